"""Options: fields of frozen records, each declared once with its bound, default and meaning.

A field made with `option` is a command-line option, a key of a config file and an environment
variable; parser, help and error messages are derived from it, so an option exists in one place.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from runtime.errors import ConfigError, shown

if TYPE_CHECKING:
    from collections.abc import Callable

LARGEST_INTEGER = 2**31 - 1  # where an option names no bound of its own


def option(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
    variable: str | None = None,
    otherwise: str = "",
    secret: bool = False,
) -> Any:
    """A dataclass field that is an option.

    Args:
        default: None: derived at start, or nothing.
        at_least, above, at_most: bounds of a number.
        variable: the environment variable, where it is not LOOMSERVE_ and the field's name.
        otherwise: what a default of None stands for, in words.
        secret: its value is never shown.
    """
    meta = {
        "help": help,
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
        "choices": choices,
        "metavar": metavar,
        "variable": variable,
        "otherwise": otherwise,
        "secret": secret,
    }
    return field(default=default, metadata=meta)


@dataclass(frozen=True, slots=True)
class Option:
    """An option as everything else sees it. The arguments of `option`, and:

    Args:
        name: the field's, and the key of a config file.
        kind: bool, int, float or str.
        several: its value is a tuple of such.
        optional: None is a value.
    """

    name: str
    kind: type
    several: bool
    optional: bool
    default: Any
    help: str
    at_least: float | None
    above: float | None
    at_most: float | None
    choices: tuple[str, ...]
    metavar: str | None
    variable: str | None
    otherwise: str
    secret: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def environment_variable(self) -> str:
        return self.variable or "LOOMSERVE_" + self.name.upper()

    @property
    def allowed(self) -> str:
        """The declared bound in words; "" without one."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        low, high = self.at_least, self.at_most
        if low is not None and high is not None:
            return f"between {low} and {high}"
        if self.above is not None:
            most = "" if high is None else f", at most {high:g}"
            return f"above {self.above:g}{most}"
        if low is not None:
            return f"at least {low:g}"
        return ""

    @property
    def description(self) -> str:
        """Meaning, bound and default, for the help."""
        silent = self.kind is bool or self.default in (None, "", ())
        default = self.otherwise or ("" if silent else f"{self.default}")
        notes = [self.allowed, f"${self.variable}" if self.variable else ""]
        notes.append(f"default {default}" if default else "")
        note = "; ".join(filter(None, notes))
        return f"{self.help} ({note})" if note else self.help

    def read(self, text: Any) -> Any:
        """The value that a text stands for, on the command line or in the environment. A list of
        texts for an option with several values (words of a choice may be joined by commas), True
        for a switch are taken as they are.

        Raises: ConfigError: it stands for none of the option's type, or one outside its bound.
        """
        value = text
        if self.several and isinstance(text, str):
            value = text.split(",")
        elif self.several and self.choices:
            value = [part for word in text for part in word.split(",")]
        elif isinstance(text, str) and self.kind is not str:
            try:
                value = _READERS[self.kind](text)
            except (KeyError, ValueError):
                raise self._wrong(text, _KINDS[self.kind]) from None
        return self.accept(value)

    def accept(self, value: Any) -> Any:
        """The value of a config file as the record holds it.

        Raises: ConfigError: of another type, or outside its bound.
        """
        if self.several and isinstance(value, list | str):
            value = (value,) if isinstance(value, str) else tuple(value)
        elif self.kind is float and type(value) is int:
            value = float(value)
        self.check(value)
        return value

    def check(self, value: Any) -> None:
        """Raises: ConfigError: a value of another type, or outside the bound."""
        if value is None and self.optional:
            return
        if self.several:
            self._check_several(value)
        elif not self._has_type(value):
            raise self._wrong(value, _KINDS[self.kind])
        elif self.kind is str:
            self._check_text(value)
        elif self.kind is not bool:
            self._check_number(value)

    def _check_several(self, values: Any) -> None:
        if type(values) is not tuple or not all(type(value) is self.kind for value in values):
            raise self._wrong(values, f"a list, each {_KINDS[self.kind]}")
        for value in values:
            self._check_text(value)

    def _has_type(self, value: Any) -> bool:
        return type(value) is self.kind or (self.kind is float and type(value) is int)

    def _check_text(self, value: str) -> None:
        if self.choices and value not in self.choices:
            raise self._wrong(value, self.allowed)
        if not value and self.default != "":
            raise self._wrong(value, "some text, not empty")

    def _check_number(self, value: float) -> None:
        if self.kind is float and not math.isfinite(value):
            raise self._wrong(value, f"a finite number{self.allowed and ', ' + self.allowed}")
        low = self.at_least if self.above is None else self.above
        too_small = low is not None and (value < low or (value == low and self.above is not None))
        if too_small or (self.at_most is not None and value > self.at_most):
            raise self._wrong(value, self.allowed)
        if self.kind is int and self.at_most is None and value > LARGEST_INTEGER:
            raise self._wrong(value, f"at most {LARGEST_INTEGER}")

    def _wrong(self, value: Any, allowed: str) -> ConfigError:
        given = "" if self.secret else f" {shown(value)}"
        return ConfigError(f"{self.name}{given}: must be {allowed}")


_SWITCH = {"true": True, "1": True, "false": False, "0": False}
_READERS: dict[type, Callable[[str], Any]] = {
    int: int,
    float: float,
    bool: lambda text: _SWITCH[text.lower()],
}
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


@cache
def options_of(record: type) -> tuple[Option, ...]:
    """The fields of a record that are options, in order."""
    hints = typing.get_type_hints(record)
    return tuple(
        _option_of(item, hints[item.name])
        for item in dataclasses.fields(record)
        if "help" in item.metadata
    )


def _option_of(item: dataclasses.Field[Any], hint: Any) -> Option:
    optional = isinstance(hint, types.UnionType)
    if optional:
        hint = next(arm for arm in typing.get_args(hint) if arm is not types.NoneType)
    several = typing.get_origin(hint) is tuple
    if several:
        hint = typing.get_args(hint)[0]
    return Option(
        name=item.name,
        kind=hint,
        several=several,
        optional=optional,
        default=item.default,
        **item.metadata,
    )


def check_options(record: Any) -> None:
    """Checks every option of a record.

    Raises: ConfigError: names the option, what was given and what is allowed.
    """
    kind: type = type(record)
    for item in options_of(kind):
        item.check(getattr(record, item.name))
