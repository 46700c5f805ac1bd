"""A request's body on its way in: JSON of a bounded depth, read by declared fields."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import orjson
from aiohttp import web

from runtime.errors import InvalidRequest, shown
from server.api.fields import Body
from server.api.kinds import Reading
from server.service import SERVICE

if TYPE_CHECKING:
    from server.generation.params import ApiLimits

B = TypeVar("B", bound=Body)

# Deeper than any schema or tool needs, and so shallow that nothing behind runs out of stack.
MAX_DEPTH = 100
# orjson writes at most so many levels.
_ORJSON_DEPTH = 254
IGNORED_HEADER = "X-Loomserve-Ignored"
IGNORED = web.RequestKey("ignored", str)  # names of fields that nobody reads


async def read_body(request: web.Request, body: type[B]) -> B:
    """The request's body. Names that nobody reads are kept for the answer's header.

    Raises: InvalidRequest: it is no JSON, or a field is wrong; with --strict-fields also one that
        nobody reads. ModelNotFound. web.HTTPRequestEntityTooLarge.
    """
    service = request.app[SERVICE]
    value = parse_json(await request.read())
    reading = Reading(service.limits)
    found = body.read(value, reading)
    if reading.unknown:
        if service.config.strict_fields:
            raise _unknown(next(iter(reading.unknown)), body)
        request[IGNORED] = ", ".join(quote(name[:64], safe="[].-_") for name in reading.unknown)
    return found


def read_value(body: type[B], value: Any, limits: ApiLimits) -> B:
    """A body from JSON that no request holds."""
    return body.read(value, Reading(limits))


def parse_json(data: bytes) -> Any:
    """Raises: InvalidRequest: it is no JSON, or nested too deeply."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"body: is not valid JSON: {error}") from None
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise InvalidRequest(f"body: is nested more than {MAX_DEPTH} levels deep")
    return value


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether a value is nested more deeply: found by writing it inside so many lists that orjson
    refuses just then, which costs no walk in Python."""
    for _ in range(_ORJSON_DEPTH - depth):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return True
    return False


def _unknown(name: str, body: type[Body]) -> InvalidRequest:
    near = difflib.get_close_matches(name, body.declared, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return InvalidRequest(f"{shown(name)} is not a known field{hint}", param=name[:64])
