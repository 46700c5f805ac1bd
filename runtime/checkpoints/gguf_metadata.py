"""Values of a GGUF file's metadata, checked where they are used: a file may hold anything."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.errors import ModelError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_MOST = 2**31 - 1
_LEAST = 1e-30
_SENTENCE_PIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}


class GgufMetadata:
    """Typed reading of metadata. {arch} in a key is the file's architecture.

    A method's default is taken where the key is absent; without a default (or with None where the
    method says so) that is an error. All of them raise ModelError, naming the file, the key, its
    value and what is allowed.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = values

    def raw(self, key: str) -> Any:
        """The value as the file has it; None where it has none."""
        return self._values.get(self._key(key))

    def integer(
        self, key: str, default: int | None = None, *, low: int = 1, high: int = _MOST
    ) -> int:
        value = self._given(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(key, value, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above zero of a size that arithmetic can bear; of a float32, the shortest
        decimal that is the same float32."""
        value = self._given(key, default)
        if type(value) not in (int, float) or not _LEAST <= value <= 1 / _LEAST:
            raise self._wrong(key, value, f"a number from {_LEAST:g} to {1 / _LEAST:g}")
        return shortest(value) if isinstance(value, float) else float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._given(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._given(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        value = self._given(key, default)
        # Arrays have one type of item.
        if not isinstance(value, list) or (value and not isinstance(value[0], str)):
            raise self._wrong(key, value, "a list of texts")
        return value

    def numbers(self, key: str, count: int, default: list[float] | None = None) -> list[float]:
        """One finite number for each of `count` things."""
        value = self._given(key, default)
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(isinstance(item, int | float) and math.isfinite(item) for item in value)
        ):
            raise self._wrong(key, value, f"a list of {count} numbers")
        return value

    def flags(self, key: str, count: int, default: list[bool]) -> list[bool]:
        """One of true and false for each of `count` things."""
        value = self._given(key, default)
        if not isinstance(value, list) or [type(item) for item in value] != [bool] * count:
            raise self._wrong(key, value, f"a list of {count} of true and false")
        return value

    def token_id(self, name: str) -> int | None:
        """The id of a token with a part to play (bos, eos, unknown, ...); None where there is
        none. SentencePiece models have the usual three where the file names none."""
        key = f"tokenizer.ggml.{name}_token_id"
        default = None
        if self.raw("tokenizer.ggml.model") == "llama":
            default = _SENTENCE_PIECE_IDS.get(name)
        if default is None and self.raw(key) is None:
            return None
        return self.integer(key, default, low=0, high=len(self.texts("tokenizer.ggml.tokens")) - 1)

    def _key(self, key: str) -> str:
        return key.replace("{arch}", str(self._values.get("general.architecture")))

    def _given(self, key: str, default: Any) -> Any:
        value = self.raw(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.path}: lacks {self._key(key)}")
        return value

    def _wrong(self, key: str, value: Any, allowed: str) -> ModelError:
        given = f"a list of {len(value)}" if isinstance(value, list) else shown(value)
        return ModelError(f"{self.path}: {self._key(key)} is {given}; it must be {allowed}")


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 becomes 1e-05."""
    return float(str(np.float32(value)))
