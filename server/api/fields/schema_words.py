"""Words of which JSON schemas are made."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
OBJECT: Schema = {"type": "object"}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def record(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object; its optional fields may be null."""
    properties = {**required, **{k: maybe(v) for k, v in (optional or {}).items()}}
    return {"type": "object", "properties": properties, "required": list(required)}


def maybe(schema: Schema) -> Schema:
    """Such a value, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def array(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    bound = {} if most is None else {"maxItems": most}
    return {"type": "array", "items": items, "minItems": least, **bound}


def const(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def described(text: str, schema: Schema) -> Schema:
    return {**schema, "description": text}
