"""Bodies as records of declared fields: parsing, error texts, OpenAPI and the table of docs.

Each field is declared once, with kind, meaning and default:

    class DetokenizeBody(Body):
        tokens = required(TokenIds(), "what to turn into text")
        skip_special_tokens = served(Boolean(), "leave special tokens out", default=False)
        unserved = ignored("there is one worker", "worker")

    body = DetokenizeBody.read(json, reading)
    body.tokens                                     # list[int], and mypy knows it

Decision: why not pydantic or msgspec. Both read a body into a record, faster than this does, but
most of what is asked for here is what they leave to their users: `null` is absent and `true` no
number (pydantic: strict mode and a validator per field), messages that quote the value and what is
allowed (both: a translation of their error codes), bounds that the model and options set (both: a
type made anew per server), names that are refused or ignored for a reason and unknown ones that are
reported but not refused (neither). What would be left of them is the loop in `Body.read`. Options
are declared in this way too (`runtime.options.option`), so there is one pattern to learn. To be
reopened when reading bodies shows in a profile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, overload

from runtime.errors import InvalidRequest, missing, shown, wrong
from server.api.fields.kinds import Kind, ServerBound, resolved
from server.api.fields.schema_words import maybe, ref

if TYPE_CHECKING:
    from collections.abc import Mapping

    from server.api.fields.kinds import Reading
    from server.api.fields.schema_words import Schema
    from server.generation.params import ApiLimits

T = TypeVar("T")
B = TypeVar("B", bound="Body")

REQUIRED: Any = object()
# A field that holds one of these does not say anything, where one of several must.
_NOT_GIVEN: tuple[Any, ...] = (None, False, "")
# Values that ask for nothing: a field that is not served may hold them.
NOTHING: tuple[Any, ...] = (None, False, "", [], {})


class Served(Generic[T]):
    """A field that is read: as an attribute of a body's class, its declaration, and of a body, its
    value.

    Args:
        names: in the body; where several are given, the first of them counts. The attribute's own
            where there are none.
        default: where it is absent or null; REQUIRED where it must not be.
    """

    __slots__ = ("attribute", "default", "kind", "meaning", "names")

    def __init__(
        self, kind: Kind[Any], meaning: str, default: Any, names: tuple[str, ...] = ()
    ) -> None:
        self.kind, self.meaning, self.default, self.names = kind, meaning, default, names
        self.attribute = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.attribute = name
        self.names = self.names or (name,)

    @overload
    def __get__(self, body: None, owner: type) -> Self: ...
    @overload
    def __get__(self, body: Body, owner: type) -> T: ...
    def __get__(self, body: Body | None, owner: type) -> Any:
        return self  # a body's value is in its own dict, which comes before this


@overload
def served(
    kind: Kind[T], meaning: str, *, default: T | ServerBound, names: tuple[str, ...] = ()
) -> Served[T]: ...
@overload
def served(kind: Kind[T], meaning: str, *, names: tuple[str, ...] = ()) -> Served[T | None]: ...
def served(
    kind: Kind[Any], meaning: str, *, default: Any = None, names: tuple[str, ...] = ()
) -> Served[Any]:
    """An optional field."""
    return Served(kind, meaning, default, names)


def required(kind: Kind[T], meaning: str) -> Served[T]:
    """A field that must be there."""
    return Served(kind, meaning, REQUIRED)


@dataclass(frozen=True, slots=True)
class Unserved:
    """A field that is known and not served.

    Args:
        refused: it is refused by name, unless its value asks for nothing; else it is ignored.
        harmless: a further value that asks for nothing, or a tuple of such.
    """

    name: str
    reason: str
    refused: bool
    harmless: Any = None

    @property
    def allowed(self) -> tuple[Any, ...]:
        """Values that ask for nothing."""
        more = self.harmless if isinstance(self.harmless, tuple) else (self.harmless,)
        return (*NOTHING, *(one for one in more if one is not None and one is not False))

    def check(self, value: Any, where: str) -> None:
        """Raises: InvalidRequest: the value asks for what is not served."""
        if self.refused and not any(_equal(value, one) for one in self.allowed):
            raise InvalidRequest(
                f"{where}: got {shown(value)}, but is not served: {self.reason}", param=where
            )

    def schema(self) -> Schema:
        """The JSON schema of the values that are taken."""
        if not self.refused:
            return {"description": f"ignored: {self.reason}"}
        return {"enum": list(self.allowed), "description": f"not served: {self.reason}"}


def refused(reason: str, *names: str, **harmless: Any) -> tuple[Unserved, ...]:
    """Fields that are refused. Args: harmless: names of others, and a value that asks nothing."""
    asked = {**dict.fromkeys(names), **harmless}
    return tuple(Unserved(name, reason, True, value) for name, value in asked.items())


def ignored(reason: str, *names: str) -> tuple[Unserved, ...]:
    """Fields that change nothing, whatever they hold."""
    return tuple(Unserved(name, reason, False) for name in names)


def _equal(value: Any, other: Any) -> bool:
    """As JSON has it: 1 is 1.0, and true is no number."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


class Body:
    """A JSON object whose fields are declared.

    Attributes:
        unserved: fields that are known and not read. A subclass adds its own, and may serve what
            its bases do not.
        open: other fields are handed to the chat template; unknown are those that it never names.
        one_of: names of attributes of which exactly one must be given.
        declared: every known name with its declaration; the body's own before its bases'.
        attributes: the served fields, each once; required: those that must be there.
        given: the JSON object.
    """

    unserved: ClassVar[tuple[Unserved, ...]] = ()
    open: ClassVar[bool] = False
    one_of: ClassVar[tuple[str, ...]] = ()
    declared: ClassVar[Mapping[str, Served[Any] | Unserved]]
    attributes: ClassVar[tuple[Served[Any], ...]]
    required: ClassVar[tuple[Served[Any], ...]]
    _defaults: ClassVar[Mapping[str, Any]]
    _limits: ClassVar[Mapping[str, ServerBound]]

    def __init_subclass__(cls) -> None:
        attributes: dict[str, Served[Any]] = {}
        unserved: dict[str, Served[Any] | Unserved] = {}
        for base in cls.__mro__:
            for name, value in vars(base).items():
                if isinstance(value, Served):
                    attributes.setdefault(name, value)
            for one in vars(base).get("unserved", ()):
                unserved.setdefault(one.name, one)
        cls.attributes = tuple(attributes.values())
        served_names = {name: one for one in cls.attributes for name in one.names}
        cls.declared = served_names | {k: v for k, v in unserved.items() if k not in served_names}
        cls.required = tuple(one for one in cls.attributes if one.default is REQUIRED)
        optional = {a: one.default for a, one in attributes.items() if one.default is not REQUIRED}
        cls._defaults = {a: v for a, v in optional.items() if not isinstance(v, ServerBound)}
        cls._limits = {a: v for a, v in optional.items() if isinstance(v, ServerBound)}

    def __init__(self, values: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Args: values: of the served fields, by attribute."""
        self.__dict__.update(values)
        self.given = given

    @classmethod
    def read(cls, value: Any, reading: Reading, where: str = "") -> Self:
        """The body that a JSON object is.

        Args: where: it stands in the whole body.
        Raises: InvalidRequest: a field that is wrong, missing or refused, by name.
        """
        if not isinstance(value, dict):
            raise wrong(where or "body", value, "a JSON object")
        prefix = where + "." if where else ""
        known, found = cls.declared, dict(cls._defaults)
        for name, given in value.items():
            declared = known.get(name)
            if declared is None:
                if not (cls.open and name in reading.template_words):
                    reading.note(prefix + name)
            elif given is None:
                continue
            elif isinstance(declared, Unserved):
                declared.check(given, prefix + name)
            else:
                read = declared.kind.read(given, prefix + name, reading)
                if declared.names[0] == name or _first_given(declared, value) == name:
                    found[declared.attribute] = read
        for declared in cls.required:
            if declared.attribute not in found:
                allowed = declared.kind.allowed(reading.limits)
                raise missing(prefix + declared.names[0], allowed)
        for attribute, default in cls._limits.items():
            if attribute not in found:
                found[attribute] = default.resolved(reading.limits)
        if cls.one_of and sum(found[name] not in _NOT_GIVEN for name in cls.one_of) != 1:
            choices = ", ".join(cls.one_of)
            name = prefix + getattr(cls, cls.one_of[0]).names[0]
            raise InvalidRequest(f"{name}: exactly one of {choices} must be given", param=name)
        body = cls(found, value)
        body.check(where, reading.limits)
        return body

    def check(self, where: str, limits: ApiLimits) -> None:
        """Raises: InvalidRequest: fields that are right by themselves make no sense together."""


def _first_given(declared: Served[Any], value: Mapping[str, Any]) -> str:
    """Which of a field's names counts."""
    return next(name for name in declared.names if value.get(name) is not None)


def schema_of(body: type[Body], limits: ApiLimits) -> Schema:
    """The JSON schema of a body, as /openapi.json shows it."""
    properties: dict[str, Schema] = {}
    for name, declared in body.declared.items():
        if isinstance(declared, Unserved):
            properties[name] = declared.schema()
            continue
        schema = declared.kind.schema(limits)
        default = resolved(declared.default, limits)
        if default is not REQUIRED:
            schema = maybe(schema)
        properties[name] = {**schema, "description": declared.meaning}
        if default not in (REQUIRED, None):
            properties[name]["default"] = default
    needed = [one.names[0] for one in body.required]
    schema = {"type": "object", "properties": properties, "required": needed}
    names = [name for one in body.one_of for name in getattr(body, one).names]
    if names:
        given = {"not": {"enum": list(_NOT_GIVEN)}}
        schema["oneOf"] = [{"required": [name], "properties": {name: given}} for name in names]
    return schema


class Record(Kind[B]):
    """An object with declared fields inside a body."""

    json_types = (dict,)

    def __init__(self, body: type[B]) -> None:
        self.body = body

    def read(self, value: Any, where: str, reading: Reading) -> B:
        return self.body.read(value, reading, where)

    def allowed(self, limits: ApiLimits | None) -> str:
        names = [one.names[0] for one in self.body.required]
        return "an object" + (f" with {' and '.join(names)}" if names else "")

    def schema(self, limits: ApiLimits) -> Schema:
        return ref(self.body.__name__)

    def parts(self) -> tuple[type[Body], ...]:
        return (self.body,)


class Tagged(Kind[Any]):
    """An object of one of several bodies; one of its fields tells which.

    Args:
        tag: the field's name.
        bodies: its values, each with the body that the object then is.
        default: the value where there is none.
        reason: why other values are not served, for messages.
    """

    json_types = (dict,)

    def __init__(
        self,
        tag: str,
        bodies: Mapping[str, type[Body]],
        *,
        default: str | None = None,
        reason: str = "",
    ) -> None:
        self.tag, self.bodies, self.default, self.reason = tag, bodies, default, reason

    def read(self, value: Any, where: str, reading: Reading) -> Any:
        if not isinstance(value, dict):
            raise self.wrong(value, where, reading)
        tag = value.get(self.tag)
        if tag is None:
            tag = self.default
        body = self.bodies.get(tag) if isinstance(tag, str) else None
        if body is None:
            reason = f"; {self.reason}" if self.reason else ""
            allowed = f"{', '.join(self.bodies)}{reason}"
            if tag is None:
                raise missing(f"{where}.{self.tag}", f"one of {allowed}")
            raise wrong(f"{where}.{self.tag}", tag, f"one of {allowed}")
        return body.read(value, reading, where)

    def allowed(self, limits: ApiLimits | None) -> str:
        return f"an object whose {self.tag} is one of {', '.join(self.bodies)}"

    def schema(self, limits: ApiLimits) -> Schema:
        return {"anyOf": [ref(body.__name__) for body in self.parts()]}

    def parts(self) -> tuple[type[Body], ...]:
        return tuple(dict.fromkeys(self.bodies.values()))


def inner_bodies(*bodies: type[Body]) -> dict[str, type[Body]]:
    """The bodies inside these, at any depth, by name. Two of one name are a mistake."""
    found: dict[str, type[Body]] = {}
    waiting = [part for body in bodies for part in _parts(body)]
    while waiting:
        body = waiting.pop()
        if found.setdefault(body.__name__, body) is not body:
            raise TypeError(f"two bodies are called {body.__name__}")
        waiting += [part for part in _parts(body) if part.__name__ not in found]
    return dict(sorted(found.items()))


def _parts(body: type[Body]) -> list[type[Body]]:
    return [part for declared in body.attributes for part in declared.kind.parts()]
