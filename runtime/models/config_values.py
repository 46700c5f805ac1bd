"""Values of a config.json, checked where they are used: a file may hold anything.

A default is taken where the key is absent or null; without one that is an error. All functions
raise ModelError, naming the key, its value and what is allowed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.errors import ModelError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    Config = Mapping[str, Any]

_MOST_INTEGER = 2**31 - 1
LEAST, MOST = 1e-30, 1e30
_MOST_LAYERS = 10_000
# Far beyond any model, and small enough for tables of a row per position.
MOST_POSITIONS = 2**25


def integer(
    config: Config, key: str, default: int | None = None, *, low: int = 1, high: int = _MOST_INTEGER
) -> int:
    value = _given(config, key, default)
    if type(value) is not int or not low <= value <= high:
        raise _wrong(key, value, f"an integer from {low} to {high}")
    return value


def layers(config: Config) -> int:
    """How many layers the model has."""
    return integer(config, "num_hidden_layers", high=_MOST_LAYERS)


def number(config: Config, key: str, default: float | None = None, *, low: float = LEAST) -> float:
    """A number above zero of a size that arithmetic can bear: from `low` to 1e30."""
    value = _given(config, key, default)
    if not is_number(value, low=low):
        raise _wrong(key, value, f"a number from {low:g} to {MOST:g}")
    return float(value)


def flag(config: Config, key: str, default: bool) -> bool:
    value = _given(config, key, default)
    if type(value) is not bool:
        raise _wrong(key, value, "true or false")
    return value


def text(config: Config, key: str, default: str) -> str:
    value = _given(config, key, default)
    if not isinstance(value, str):
        raise _wrong(key, value, "a text")
    return value


def per_layer(config: Config, key: str) -> list[Any] | None:
    """A list with an entry for each layer; None where there is none."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != layers(config):
        raise _wrong(key, value, f"a list with an entry for each of {layers(config)} layers")
    return value


def integers(config: Config, key: str) -> list[int]:
    """A list of integers, empty where there is none."""
    value = _given(config, key, [])
    if not isinstance(value, list) or not all(type(entry) is int for entry in value):
        raise _wrong(key, value, "a list of integers")
    return value


def section(config: Config, key: str) -> dict[str, Any]:
    """An object within the config, empty where there is none."""
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise _wrong(key, value, "an object")
    return value


def is_number(value: Any, *, low: float = LEAST) -> bool:
    return type(value) in (int, float) and low <= value <= MOST


def _given(config: Config, key: str, default: Any) -> Any:
    value = config.get(key)
    return default if value is None else value


def _wrong(key: str, value: Any, allowed: str) -> ModelError:
    given = "absent" if value is None else shown(value)
    return ModelError(f"config.json: {key} is {given}; it must be {allowed}")
