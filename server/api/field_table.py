"""The declared fields as rows of a table, for /docs and docs/request-fields.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from server.api.fields import REQUIRED, Unserved
from server.api.kinds import resolved

if TYPE_CHECKING:
    from server.api.fields import Body, Served
    from server.generation.params import ApiLimits


class Row(NamedTuple):
    """A field in words. allowed: what it may be, or that it is refused or ignored."""

    name: str
    allowed: str
    default: str
    meaning: str


def rows_of(body: type[Body], limits: ApiLimits | None) -> list[Row]:
    """The fields of a body, those not served last. limits: None where no server runs."""
    found = []
    for name, declared in body.declared.items():
        if isinstance(declared, Unserved):
            what = "refused" if declared.refused else "ignored"
            found.append(Row(name, what, "", declared.reason))
        elif name == declared.names[0]:
            allowed = declared.kind.allowed(limits)
            found.append(Row(name, allowed, _default(declared, limits), declared.meaning))
        else:
            found.append(Row(name, "", "", f"the same as {declared.names[0]}"))
    return found


def _default(declared: Served[Any], limits: ApiLimits | None) -> str:
    value = resolved(declared.default, limits)
    if value is REQUIRED:
        return "required"
    if value is None or isinstance(value, str):
        return value or ""
    return orjson.dumps(value).decode()
