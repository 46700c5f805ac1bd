"""Whether two JSON schemas exclude each other, as the branches of a oneOf must."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

from server.grammars.nesting import target_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
# Beyond these nothing is proven: references may turn in a circle, and branches have branches.
_MAX_DEPTH = 16
_MAX_COMPARISONS = 5_000  # of one schema, some milliseconds


class Definitions:
    """Compares schemas within `whole`, where their references lead."""

    def __init__(self, whole: dict[str, Any]) -> None:
        self._whole = whole
        self._comparisons = 0

    def disjoint(self, branches: Sequence[Any]) -> bool:
        """Whether it is proven that no value follows two of these schemas."""
        return all(self._apart(a, b, 0) for a, b in itertools.combinations(branches, 2))

    def _apart(self, a: Any, b: Any, depth: int) -> bool:
        self._comparisons += 1
        if a is False or b is False:
            return True
        if depth > _MAX_DEPTH or self._comparisons > _MAX_COMPARISONS:
            return False
        if not (isinstance(a, dict) and isinstance(b, dict)):
            return False
        for one, other in ((a, b), (b, a)):
            for part in self._parts(one):
                if self._apart(part, other, depth + 1):
                    return True
            for key in ("anyOf", "oneOf"):
                ways = one.get(key)
                if isinstance(ways, list) and all(self._apart(w, other, depth + 1) for w in ways):
                    return True
        return self._differ(a, b, depth)

    def _parts(self, schema: dict[str, Any]) -> list[Any]:
        """Schemas that a value of this one follows as well."""
        parts = schema.get("allOf")
        found = list(parts) if isinstance(parts, list) else []
        pointer = schema.get("$ref")
        target = target_of(self._whole, pointer) if isinstance(pointer, str) else None
        return found if target is None else [target, *found]

    def _differ(self, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        """Whether what two schemas themselves say excludes each other."""
        kinds = _kinds(a) & _kinds(b)
        if not kinds:
            return True
        values, others = _constants(a), _constants(b)
        if values is not None and others is not None and not values & others:
            return True
        if kinds == {"number"}:
            return _ranges_apart(a, b, "minimum", "maximum")
        if kinds == {"string"}:
            return _ranges_apart(a, b, "minLength", "maxLength")
        if kinds == {"array"}:
            return _ranges_apart(a, b, "minItems", "maxItems")
        return kinds == {"object"} and self._objects_differ(a, b, depth)

    def _objects_differ(self, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        required = [set(_list_of(s.get("required"), str)) for s in (a, b)]
        properties = [_object(schema.get("properties")) for schema in (a, b)]
        for name in required[0] & required[1]:
            if self._apart(properties[0].get(name, {}), properties[1].get(name, {}), depth + 1):
                return True
        for needed, other, known in zip(required, (b, a), reversed(properties), strict=True):
            closed = other.get("additionalProperties") is False and "patternProperties" not in other
            if closed and needed - set(known):
                return True
        return False


def _kinds(schema: dict[str, Any]) -> frozenset[str]:
    """The JSON types that a value may have; integers are numbers."""
    values = _constants(schema)
    if values is not None:
        return frozenset(value.partition(":")[0] for value in values)
    given = schema.get("type")
    names = [given] if isinstance(given, str) else _list_of(given, str)
    found = {"number" if name == "integer" else name for name in names}
    return frozenset(found) & _TYPES if found else _TYPES


def _constants(schema: dict[str, Any]) -> frozenset[str] | None:
    """The values that are allowed, each with its type before it; None: any."""
    if "const" in schema:
        return frozenset({_constant(schema["const"])})
    values = schema.get("enum")
    return frozenset(map(_constant, values)) if isinstance(values, list) else None


def _constant(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return f"{'null' if value is None else 'boolean'}:{value}"
    if isinstance(value, int | float):
        whole = isinstance(value, int) or value.is_integer()
        return f"number:{int(value) if whole else value}"
    kind = "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
    return f"{kind}:{json.dumps(value, sort_keys=True)}"


def _ranges_apart(a: dict[str, Any], b: dict[str, Any], low: str, high: str) -> bool:
    """Whether one schema's values end below where the other's begin."""
    for one, other in ((a, b), (b, a)):
        top, bottom = one.get(high), other.get(low)
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (top, bottom))
        if numbers and top < bottom:  # type: ignore[operator]
            return True
    return False


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list_of(value: Any, kind: type) -> list[Any]:
    return [one for one in value if isinstance(one, kind)] if isinstance(value, list) else []
