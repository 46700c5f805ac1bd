"""`format` is an annotation (JSON Schema 2020-12, validation, 7.2): what is known is enforced, what
is not is left out, and the rest of the schema holds either way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import jsonschema
import pydantic
import pytest

from server.grammars.json_schema import json_schema
from tests.server.grammars.library import compiled, takes

UNKNOWN = (
    *("path", "binary", "password", "uuid4", "base64", "int64", "byte"),
    *("uri-reference", "regex", "idn-email", "json-pointer", "decimal", "my own"),
)
KNOWN = {
    "date": "2024-01-31",
    "date-time": "2024-01-31T12:00:00Z",
    "time": "12:00:00Z",
    "duration": "P1D",
    "email": "a@b.org",
    "hostname": "a.b.org",
    "ipv4": "127.0.0.1",
    "ipv6": "::1",
    "uri": "http://a.org/b",
    "uuid": "12345678-1234-4234-8234-123456789abc",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_format_leaves_the_rest_of_the_schema(name):
    schema = {"type": "string", "format": name, "maxLength": 4}
    matcher = compiled(json_schema(schema, "x"))
    for text, value in (('"abcd"', "abcd"), ('"abcde"', "abcde"), ("5", 5), ('""', "")):
        valid = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert takes(matcher, text) is valid, text


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_format_is_enforced(name):
    matcher = compiled(json_schema({"type": "string", "format": name}, "x"))
    assert takes(matcher, f'"{KNOWN[name]}"')
    assert not takes(matcher, '"not @ one"')


class Everything(pydantic.BaseModel):
    path: Path
    raw: bytes
    secret: pydantic.SecretStr
    id: pydantic.UUID4
    encoded: pydantic.Base64Bytes
    pattern: Any = pydantic.Field(json_schema_extra={"format": "regex"})


def test_types_of_pydantic_are_served():
    matcher = compiled(json_schema(Everything.model_json_schema(), "x"))
    value = Everything(
        path=Path("/a"),
        raw=b"b",
        secret=pydantic.SecretStr("c"),
        id=UUID(KNOWN["uuid"]),
        encoded=b"ZA==",
        pattern="e",
    )
    assert takes(matcher, value.model_dump_json())
    assert not takes(matcher, value.model_dump_json().replace('"/a"', "1"))
