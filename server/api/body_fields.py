"""Strict reading of a request body: each value has its type and range, or the client is told.

`null` counts as absent, unknown fields are left alone, `true` is not a number, and 2.0 is not an
integer. Messages name the field, what was given and what is allowed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from runtime.errors import InvalidRequest, wrong

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class BodyFields:
    """A JSON object whose fields are read by type.

    Args:
        prefix: where the object stands in the body, for messages.
        names: what this object calls a field, for fields that it calls otherwise.

    Raises: InvalidRequest: from every method, where a value is not of that type or range.
    """

    __slots__ = ("_names", "_prefix", "values")

    def __init__(
        self, values: Any, prefix: str = "", names: Mapping[str, str] | None = None
    ) -> None:
        if not isinstance(values, dict):
            raise wrong(prefix or "body", values, "a JSON object")
        self.values: Mapping[str, Any] = values
        self._prefix = prefix + "." if prefix else ""
        self._names = names or {}

    def get(self, name: str) -> Any:
        """The raw value; None when absent."""
        return self.values.get(self._names.get(name, name))

    def error(self, name: str, allowed: str) -> InvalidRequest:
        """The error for this field's value."""
        return wrong(self._prefix + self._names.get(name, name), self.get(name), allowed)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def string(self, name: str, default: str | None = None) -> str | None:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def integer(
        self, name: str, *, low: int, high: int | None = None, default: int | None = None
    ) -> int | None:
        value = self.get(name)
        if value is None:
            return default
        allowed = f"an integer of at least {low}"
        if high is not None:
            allowed = f"an integer between {low} and {high}"
        if type(value) is not int or value < low or (high is not None and value > high):
            raise self.error(name, allowed)
        return value

    def number(
        self,
        name: str,
        default: float,
        *,
        low: float = -math.inf,
        high: float = math.inf,
    ) -> float:
        """A finite number from low to high."""
        value = self.get(name)
        if value is None:
            return default
        good = type(value) in (int, float) and math.isfinite(value) and low <= value <= high
        if not good:
            raise self.error(name, _range(low, high))
        return float(value)

    def strings(self, name: str, *, most: int, longest: int = 4096) -> tuple[str, ...]:
        """A string or a list of strings, none empty."""
        value = self.get(name)
        if value is None:
            return ()
        items = [value] if isinstance(value, str) else value
        allowed = f"a string or a list of at most {most} strings, each of 1 to {longest} characters"
        if not isinstance(items, list) or len(items) > most:
            raise self.error(name, allowed)
        if not all(isinstance(item, str) and 0 < len(item) <= longest for item in items):
            raise self.error(name, allowed)
        return tuple(items)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """A list of token ids of the vocabulary."""
        value = self.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.error(name, "a list of token ids")
        check_token_ids(value, vocab_size, self._prefix + self._names.get(name, name))
        return tuple(value)

    def choice(self, name: str, allowed: Sequence[str], default: str) -> str:
        value = self.get(name)
        if value is None:
            return default
        if value not in allowed:
            raise self.error(name, "one of " + ", ".join(allowed))
        return str(value)


def check_token_ids(ids: Sequence[Any], vocab_size: int, name: str) -> None:
    """Raises: InvalidRequest: an entry is no token id of the vocabulary."""
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise wrong(name, token_id, f"a token id between 0 and {vocab_size - 1}")


def _range(low: float, high: float) -> str:
    if math.isinf(low) and math.isinf(high):
        return "a number"
    if math.isinf(high):
        return f"a number of at least {low:g}"
    return f"a number from {low:g} to {high:g}"
