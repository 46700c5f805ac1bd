"""JSON schemas that clients give, in the form that the grammar library enforces rightly.

What says nothing is left out, what the library would get wrong is said in another way or refused;
a schema is never enforced in part without a word.
"""

from __future__ import annotations

import json
import re
from typing import Any

from runtime.errors import InvalidRequest
from server.grammars.nesting import (
    MAX_REFERENCES,
    MAX_REGEX_NESTING,
    regex_nesting,
    schema_nesting,
)
from server.grammars.one_of import Definitions
from server.grammars.schema_numbers import check_constant, fit_bounds, fit_counts
from server.grammars.sources import MAX_DEPTH, Source

# At most a line break and its indentation between two tokens of JSON: a model cannot fill its
# budget with blanks, and pretty-printed output stays possible.
WHITESPACE = r"[ ]{0,2}|\n[ ]{0,20}|\n\t{0,8}"
# No \u escapes: with them a model could write a key that the schema rules on in a second spelling
# ("\u0061" for "a"), which the grammar takes for an additional property.
ESCAPES = '"\\nrtbf'
# Formats that are enforced. Any other is an annotation (JSON Schema 2020-12, Validation, 7.2).
FORMATS = frozenset(
    "date date-time duration email hostname ipv4 ipv6 time uri uuid".split()  # noqa: SIM905
)
# JSON within JSON that the library's reader takes, less what stands around a schema.
_MAX_JSON_DEPTH = 120
# Beyond some five hundred the library gives up while it runs, at the first key.
_MAX_OPTIONAL = 450

_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "additionalItems")
_UNESCAPABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")


def json_schema(schema: Any, param: str) -> Source:
    """The source of a JSON schema (an object, a boolean, or the text of either).

    Raises: InvalidRequest: the schema is no schema, or needs what cannot be enforced.
    """
    guidance = {"whitespace_pattern": WHITESPACE, "json_allowed_escapes": ESCAPES}
    checked = checked_schema(schema, param)
    return [{"name": "json", "json_schema": {**checked, "x-guidance": guidance}}]


def any_json_object(param: str) -> Source:
    """The source of any JSON object."""
    return json_schema({"type": "object"}, param)


def checked_schema(schema: Any, param: str) -> dict[str, Any]:
    """The schema as the grammar library may have it. Raises: InvalidRequest: see `json_schema`."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{param}: the schema is not JSON: {error}", param=param) from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        what = "allows nothing" if schema is False else "must be a JSON object"
        raise InvalidRequest(f"{param}: the schema {what}", param=param)
    _check_nesting(schema, param)
    found = _Check(schema, param).schema(schema, 0)
    assert isinstance(found, dict)
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _check_nesting(schema: dict[str, Any], param: str) -> None:
    depth, references = schema_nesting(schema)
    if depth > _MAX_JSON_DEPTH:
        raise InvalidRequest(
            f"{param}: the schema is nested more than {_MAX_JSON_DEPTH} levels deep", param=param
        )
    if references > MAX_REFERENCES:
        raise InvalidRequest(
            f"{param}: the schema's definitions refer to one another more than {MAX_REFERENCES}"
            " levels deep",
            param=param,
        )


class _Check:
    """Goes through one client's schema."""

    def __init__(self, whole: dict[str, Any], param: str) -> None:
        self._definitions = Definitions(whole)
        self._param = param

    def schema(self, schema: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise self._error(f"the schema is nested more than {MAX_DEPTH} levels deep")
        if not isinstance(schema, dict):
            return schema  # a boolean; anything else is refused by the library, which names it
        result = {key: value for key, value in schema.items() if key != "x-guidance"}
        self._check_texts(result)
        self._check_properties(result)
        if result.get("uniqueItems") is False:
            del result["uniqueItems"]
        if isinstance(form := result.get("format"), str) and form not in FORMATS:
            del result["format"]
        try:
            fit_bounds(result)
            fit_counts(result)
            for value in (result.get("const"), result.get("enum")):
                check_constant(value)
        except ValueError as error:
            raise self._error(str(error)) from None
        self._one_of(result)
        return self._inner(result, depth + 1)

    def _inner(self, result: dict[str, Any], depth: int) -> dict[str, Any]:
        for key in _SCHEMA_MAPS:
            if isinstance(value := result.get(key), dict):
                result[key] = {k: self.schema(v, depth) for k, v in value.items()}
        for key in (*_SCHEMA_LISTS, *_SCHEMAS):
            value = result.get(key)
            if isinstance(value, list):
                result[key] = [self.schema(v, depth) for v in value]
            elif isinstance(value, dict):
                result[key] = self.schema(value, depth)
        return result

    def _check_texts(self, schema: dict[str, Any]) -> None:
        if _UNESCAPABLE.search(_texts_of(schema)):
            raise self._error(
                "control characters other than \\b \\t \\n \\f \\r cannot be enforced"
            )
        patterns = schema.get("patternProperties")
        for pattern in (schema.get("pattern"), *(patterns if isinstance(patterns, dict) else ())):
            if isinstance(pattern, str) and regex_nesting(pattern) > MAX_REGEX_NESTING:
                raise self._error(f"a pattern is nested more than {MAX_REGEX_NESTING} levels deep")

    def _check_properties(self, schema: dict[str, Any]) -> None:
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, dict) and len(properties) > _MAX_OPTIONAL:
            names = required if isinstance(required, list) else ()
            known = {name for name in names if isinstance(name, str)}
            optional = len(properties.keys() - known)
            if optional > _MAX_OPTIONAL:
                raise self._error(
                    f"an object with {optional} properties that may be left out cannot be enforced;"
                    f" at most {_MAX_OPTIONAL} can"
                )

    def _one_of(self, schema: dict[str, Any]) -> None:
        """Branches of which no two can hold at once are what anyOf takes; the library finds that
        out itself only where no reference stands between."""
        branches = schema.get("oneOf")
        if not isinstance(branches, list) or not branches:
            return
        if self._definitions.disjoint(branches):
            del schema["oneOf"]
            if "anyOf" in schema:
                schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": branches}]
            else:
                schema["anyOf"] = branches

    def _error(self, message: str) -> InvalidRequest:
        return InvalidRequest(f"{self._param}: {message}", param=self._param)


def _texts_of(schema: dict[str, Any]) -> str:
    """The names, constants and patterns of a schema itself, which become text of the output."""
    found: list[str] = []
    pending: list[Any] = [schema.get(key) for key in ("const", "enum", "required", "pattern")]
    for key in ("properties", "patternProperties"):
        if isinstance(named := schema.get(key), dict):
            pending += named
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, dict):
            pending += (*value, *value.values())
        elif isinstance(value, list):
            pending += value
    return "".join(found)
