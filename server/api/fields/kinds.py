"""Kinds of values that a request body may hold: how each is read, told and published.

`read` takes JSON as orjson made it and is strict: `true` is no number and 2.0 no integer. `allowed`
is what error texts and the table of fields say; `schema` is what /openapi.json says. Each kind
states its bounds once, for all three; a bound that the running server sets is a `ServerBound`.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from runtime.errors import InvalidRequest, wrong

if TYPE_CHECKING:
    from collections.abc import Callable

    from server.api.fields.schema_words import Schema
    from server.generation.params import ApiLimits

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServerBound:
    """A value that the model or an option sets. Args: told: where no server runs."""

    told: str
    of: Callable[[ApiLimits], Any]

    def resolved(self, limits: ApiLimits | None) -> Any:
        return self.told if limits is None else self.of(limits)


Bound = float | ServerBound
LAST_TOKEN_ID = ServerBound("the vocabulary's last", lambda limits: limits.vocab_size - 1)
CONTEXT_LENGTH = ServerBound("the context length", lambda limits: limits.context_length)
MAX_LOGPROBS = ServerBound("--max-logprobs", lambda limits: limits.max_logprobs)
MAX_N = ServerBound("--max-n", lambda limits: limits.max_n)


def resolved(value: Any, limits: ApiLimits | None) -> Any:
    """A bound or default: itself, or what the server at hand has for it."""
    return value.resolved(limits) if isinstance(value, ServerBound) else value


_PLACE = re.compile(r"\[\d+\]")


@dataclass(slots=True)
class Reading:
    """One body that is being read.

    Args: template_words: all that a chat template names, so that it may read such a field.
    Attributes: unknown: names in the body that nobody reads.
    """

    limits: ApiLimits
    template_words: frozenset[str] = frozenset()
    unknown: dict[str, None] = field(default_factory=dict)

    def note(self, where: str) -> None:
        """Takes down an unknown name. What differs only by its place in a list is one."""
        self.unknown[_PLACE.sub("[]", where) if "[" in where else where] = None


class Kind(ABC, Generic[T]):
    """A kind of value. json_types: Python types of the JSON values that it may be made from."""

    json_types: tuple[type, ...]

    @abstractmethod
    def read(self, value: Any, where: str, reading: Reading) -> T:
        """The value. Raises: InvalidRequest: it is not of this kind; `where` names it."""

    @abstractmethod
    def allowed(self, limits: ApiLimits | None) -> str:
        """What is allowed, to follow "must be". limits: None where no server runs."""

    @abstractmethod
    def schema(self, limits: ApiLimits) -> Schema:
        """The JSON schema of exactly the values that `read` takes."""

    def parts(self) -> tuple[type[Any], ...]:
        """The bodies that such a value may be or hold."""
        return ()

    def wrong(self, value: Any, where: str, reading: Reading) -> InvalidRequest:
        return wrong(where, value, self.allowed(reading.limits))


class Plain(Kind[T]):
    """A kind that its JSON schema tells whole: what is read is what the schema allows.

    Args:
        told: what is allowed; {minimum} and the like stand for the schema's bounds.
        made: makes the value that the body then has of one that is allowed.
        schema: its words, of those in `_TESTS`; a bound may be a `ServerBound`.
    """

    def __init__(self, told: str, made: Callable[[Any], T] | None = None, **schema: Any) -> None:
        self._told, self._made, self._schema = told, made, schema
        self.json_types = _TYPES[schema["type"]]
        self._tests = [(_TESTS[word], bound) for word, bound in schema.items() if word in _TESTS]

    def read(self, value: Any, where: str, reading: Reading) -> T:
        for test, bound in self._tests:
            if not test(value, resolved(bound, reading.limits)):
                raise self.wrong(value, where, reading)
        made: T = value if self._made is None else self._made(value)
        return made

    def allowed(self, limits: ApiLimits | None) -> str:
        return self._told.format_map({k: resolved(v, limits) for k, v in self._schema.items()})

    def schema(self, limits: ApiLimits) -> Schema:
        return {word: resolved(value, limits) for word, value in self._schema.items()}


_TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "string": (str,),
}
# What each word of a schema asks of a value; the type comes first.
_TESTS: dict[str, Callable[[Any, Any], bool]] = {
    # JSON has no infinity, but 1e999 reads as one.
    "type": lambda value, name: (
        type(value) in _TYPES[name] and (name != "number" or math.isfinite(value))
    ),
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "minLength": lambda value, bound: len(value) >= bound,
    "pattern": lambda value, pattern: re.fullmatch(pattern, value) is not None,
    "enum": lambda value, values: value in values,
}


def Boolean() -> Kind[bool]:
    return Plain("true or false", type="boolean")


def Integer(low: int, high: int | ServerBound | None = None) -> Kind[int]:
    if high is None:
        return Plain("an integer of at least {minimum}", type="integer", minimum=low)
    told = "an integer between {minimum} and {maximum}"
    return Plain(told, type="integer", minimum=low, maximum=high)


def Number(low: float, high: float | None = None) -> Kind[float]:
    """A finite number."""
    if high is None:
        return Plain("a number of at least {minimum:g}", float, type="number", minimum=low)
    told = "a number from {minimum:g} to {maximum:g}"
    return Plain(told, float, type="number", minimum=low, maximum=high)


def Text(least: int = 0) -> Kind[str]:
    """A string of at least so many characters, 0 or 1."""
    if least:
        return Plain("a string that is not empty", type="string", minLength=least)
    return Plain("a string", type="string")


def Form(pattern: str, told: str) -> Kind[str]:
    """A string that a pattern matches whole."""
    return Plain(told, type="string", pattern=f"^(?:{pattern})$")


def Choice(*values: str) -> Kind[str]:
    """One of some strings."""
    told = ("one of " if len(values) > 1 else "") + ", ".join(values)
    return Plain(told, type="string", enum=list(values))


def JsonObject(about: str = "") -> Kind[dict[str, Any]]:
    """Any object; what is in it is not this API's. about: what it is."""
    more: dict[str, Any] = {"description": about} if about else {}
    return Plain(about or "a JSON object", type="object", **more)


class Items(Kind[list[T]]):
    """A list of values of one kind. of: what to call them, in the plural."""

    json_types = (list,)

    def __init__(self, kind: Kind[T], of: str, least: int = 0, most: Bound | None = None) -> None:
        self.kind, self.of, self.least, self.most = kind, of, least, most

    def read(self, value: Any, where: str, reading: Reading) -> list[T]:
        most = resolved(self.most, reading.limits)
        if not isinstance(value, list) or len(value) < self.least:
            raise self.wrong(value, where, reading)
        if most is not None and len(value) > most:
            raise self.wrong(value, where, reading)
        read = self.kind.read
        return [read(item, f"{where}[{index}]", reading) for index, item in enumerate(value)]

    def allowed(self, limits: ApiLimits | None) -> str:
        if self.most is not None:
            return f"a list of {self.least} to {resolved(self.most, limits)} {self.of}"
        return (
            f"a list of at least {self.least} {self.of}" if self.least else f"a list of {self.of}"
        )

    def schema(self, limits: ApiLimits) -> Schema:
        top = {} if self.most is None else {"maxItems": resolved(self.most, limits)}
        items = self.kind.schema(limits)
        return {"type": "array", "items": items, "minItems": self.least, **top}

    def parts(self) -> tuple[type[Any], ...]:
        return self.kind.parts()


class Texts(Kind[tuple[str, ...]]):
    """A list of strings, none empty.

    Args:
        longest: characters of one; altogether: of all of them.
        single: one string may stand by itself.
    """

    def __init__(
        self, most: int, *, longest: int = 4096, altogether: int | None = None, single: bool = True
    ) -> None:
        self.most, self.longest, self.altogether, self.single = most, longest, altogether, single
        self.json_types = (str, list) if single else (list,)

    def read(self, value: Any, where: str, reading: Reading) -> tuple[str, ...]:
        items = [value] if self.single and isinstance(value, str) else value
        if not isinstance(items, list) or len(items) > self.most:
            raise self.wrong(value, where, reading)
        if not all(isinstance(item, str) and 0 < len(item) <= self.longest for item in items):
            raise self.wrong(value, where, reading)
        if self.altogether is not None and sum(map(len, items)) > self.altogether:
            raise self.wrong(value, where, reading)
        return tuple(items)

    def allowed(self, limits: ApiLimits | None) -> str:
        one = "a string or " if self.single else ""
        total = "" if self.altogether is None else f" and {self.altogether} altogether"
        each = f"1 to {self.longest} characters"
        return f"{one}a list of at most {self.most} strings, each of {each}{total}"

    def schema(self, limits: ApiLimits) -> Schema:
        one: Schema = {"type": "string", "minLength": 1, "maxLength": self.longest}
        several = {"type": "array", "items": one, "minItems": 0, "maxItems": self.most}
        return {"anyOf": [one, several]} if self.single else several


@dataclass(frozen=True, slots=True)
class TokenIds(Kind[list[int]]):
    """A list of ids of the vocabulary."""

    least: int = 0
    most: int | None = None
    json_types = (list,)

    def read(self, value: Any, where: str, reading: Reading) -> list[int]:
        if not isinstance(value, list) or len(value) < self.least:
            raise self.wrong(value, where, reading)
        if self.most is not None and len(value) > self.most:
            raise self.wrong(value, where, reading)
        vocab_size = reading.limits.vocab_size
        for token_id in value:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise wrong(where, token_id, f"a token id between 0 and {vocab_size - 1}")
        return value

    def allowed(self, limits: ApiLimits | None) -> str:
        number = f" at least {self.least}" if self.least else ""
        number += f" at most {self.most}" if self.most is not None else ""
        return f"a list of{number} token ids between 0 and {resolved(LAST_TOKEN_ID, limits)}"

    def schema(self, limits: ApiLimits) -> Schema:
        one = Integer(0, LAST_TOKEN_ID).schema(limits)
        top = {} if self.most is None else {"maxItems": self.most}
        return {"type": "array", "items": one, "minItems": self.least, **top}


class LogitBias(Kind[tuple[tuple[int, float], ...]]):
    """An object of token ids (as text) and what is added to their logits."""

    json_types = (dict,)
    _bias = Number(-100, 100)

    def read(self, value: Any, where: str, reading: Reading) -> tuple[tuple[int, float], ...]:
        if not isinstance(value, dict):
            raise self.wrong(value, where, reading)
        vocab_size = reading.limits.vocab_size
        pairs = []
        for key, bias in value.items():
            token_id = int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else -1
            if not 0 <= token_id < vocab_size:
                raise wrong(where, key, f"a token id between 0 and {vocab_size - 1}")
            pairs.append((token_id, self._bias.read(bias, f"{where}.{key}", reading)))
        return tuple(pairs)

    def allowed(self, limits: ApiLimits | None) -> str:
        last = resolved(LAST_TOKEN_ID, limits)
        return f"an object of token ids between 0 and {last}, each with a number from -100 to 100"

    def schema(self, limits: ApiLimits) -> Schema:
        return {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": self._bias.schema(limits),
            "description": f"keys are token ids from 0 to {limits.vocab_size - 1}",
        }


class Either(Kind[Any]):
    """A value of one of several kinds, told apart by their JSON types."""

    def __init__(self, *kinds: Kind[Any]) -> None:
        self.kinds = kinds
        self.json_types = tuple(one for kind in kinds for one in kind.json_types)

    def read(self, value: Any, where: str, reading: Reading) -> Any:
        for kind in self.kinds:
            if type(value) in kind.json_types:
                return kind.read(value, where, reading)
        raise self.wrong(value, where, reading)

    def allowed(self, limits: ApiLimits | None) -> str:
        return ", or ".join(kind.allowed(limits) for kind in self.kinds)

    def schema(self, limits: ApiLimits) -> Schema:
        return {"anyOf": [kind.schema(limits) for kind in self.kinds]}

    def parts(self) -> tuple[type[Any], ...]:
        return tuple(part for kind in self.kinds for part in kind.parts())


class Checked(Kind[Any]):
    """A value of another kind, as it was given: for what is read elsewhere."""

    def __init__(self, kind: Kind[Any]) -> None:
        self.kind, self.json_types = kind, kind.json_types

    def read(self, value: Any, where: str, reading: Reading) -> Any:
        self.kind.read(value, where, reading)
        return value

    def allowed(self, limits: ApiLimits | None) -> str:
        return self.kind.allowed(limits)

    def schema(self, limits: ApiLimits) -> Schema:
        return self.kind.schema(limits)

    def parts(self) -> tuple[type[Any], ...]:
        return self.kind.parts()
