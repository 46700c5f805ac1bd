"""The declared fields as rows of a table, for /docs and docs/request-fields.md.

python -m server.api.docs.field_table > docs/request-fields.md
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from server.api.docs.openapi import BODIES, ROUTES
from server.api.fields.bodies import REQUIRED, Body, Served, Unserved, inner_bodies
from server.api.fields.kinds import resolved

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from server.generation.params import ApiLimits


Fields = dict[str, Served[Any] | Unserved]


class Row(NamedTuple):
    """A field in words. allowed: what it may be, or that it is refused or ignored."""

    name: str
    allowed: str
    default: str
    meaning: str


def rows_of(body: type[Body], limits: ApiLimits | None) -> list[Row]:
    """The fields of a body, those not served last. limits: None where no server runs."""
    return list(_rows(body.declared, limits))


def _rows(fields: Mapping[str, Served[Any] | Unserved], limits: ApiLimits | None) -> Iterable[Row]:
    for name, one in fields.items():
        if isinstance(one, Unserved):
            yield Row(name, "refused" if one.refused else "ignored", "", one.reason)
        elif name == one.names[0]:
            parts = ", ".join(dict.fromkeys(part.__name__ for part in one.kind.parts()))
            allowed = one.kind.allowed(limits) + (f" ({parts})" if parts else "")
            yield Row(name, allowed, _default(one, limits), one.meaning)
        else:
            yield Row(name, "", "", f"the same as {one.names[0]}")


def _default(declared: Served[Any], limits: ApiLimits | None) -> str:
    value = resolved(declared.default, limits)
    if value is REQUIRED:
        return "required"
    if value is None or isinstance(value, str):
        return value or ""
    return orjson.dumps(value).decode()


INTRODUCTION = """\
# Request fields

Made by `python -m server.api.docs.field_table` from the declarations in `server/api/`; a running
server shows the same with its own bounds at `/docs` and, as data, at `/openapi.json`.

A field that is *refused* gets 400 with the reason, unless its value asks for nothing (null, false,
an empty text, list or object, or what the server does anyway). One that is *ignored* changes
nothing. Any other name is told in the answer's header `X-Loomserve-Ignored`, and refused under
`--strict-fields`. `null` counts as absent, `true` is no number and 2.0 no integer.
"""


def markdown() -> str:
    """docs/request-fields.md: what bodies share is told once."""
    sections = [INTRODUCTION]
    shared: dict[type[Body], None] = {}
    told: dict[type[Body], str] = {}
    for route in ROUTES:
        if route.request in told:
            title = f"## `{route.method} {route.path}`\n\n{route.summary}."
            sections.append(f"{title}\n\nThe fields of `{told[route.request]}`.")
        elif route.request is not None:
            told[route.request] = route.path
            bases = [cls for cls in route.request.__mro__[1:] if _own(cls)]
            shared |= dict.fromkeys(bases)
            title = f"## `{route.method} {route.path}`\n\n{route.summary}."
            sections.append(title + _also(bases) + "\n\n" + _table(_own(route.request)))
    for cls in shared:
        first = (cls.__doc__ or "").partition("\n")[0]
        sections.append(f"## {cls.__name__}\n\n{first}\n\n{_table(_own(cls))}")
    sections.append("# Objects in bodies")
    for name, body in inner_bodies(*BODIES).items():
        bases = [cls for cls in body.__mro__[1:] if cls in shared]
        fields = _own(body) if bases else body.declared
        sections.append(f"## {name}{_also(bases)}\n\n{_table(fields)}")
    return "\n\n".join(section.strip() for section in sections) + "\n"


def _also(bases: Sequence[type[Body]]) -> str:
    links = ", ".join(f"[{cls.__name__}](#{cls.__name__.lower()})" for cls in bases)
    return f"\n\nAlso the fields of {links}." if links else ""


def _own(cls: type[Body]) -> Fields:
    """What a class declares itself, by name."""
    own = [one for one in vars(cls).values() if isinstance(one, Served)]
    found: Fields = {name: one for one in own for name in one.names}
    return found | {one.name: one for one in vars(cls).get("unserved", ())}


def _table(fields: Mapping[str, Served[Any] | Unserved]) -> str:
    """A table of the fields that are read, and lists of those that are not, by reason."""
    rows = list(_rows(fields, None))
    read = [row for row in rows if row.allowed not in ("refused", "ignored")]
    lines = []
    if read:
        lines = ["| field | what it may be | default | meaning |", "|---|---|---|---|"]
        lines += [f"| `{r.name}` | {r.allowed} | {r.default} | {r.meaning} |" for r in read]
    for what in ("refused", "ignored"):
        reasons: dict[str, list[str]] = {}
        for row in rows:
            if row.allowed == what:
                reasons.setdefault(row.meaning, []).append(f"`{row.name}`")
        if reasons:
            lines += ["", f"{what.capitalize()}:", ""]
            lines += [f"- {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(), end="")
