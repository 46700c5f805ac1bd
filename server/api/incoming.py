"""A request's body on its way in: JSON of bounded size and depth, read by declared fields."""

from __future__ import annotations

import asyncio
import difflib
import zlib
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import orjson
from aiohttp import web

from runtime.errors import InvalidRequest, shown
from server.api.fields.bodies import Body
from server.api.fields.kinds import Reading
from server.service import SERVICE
from server.text.json_bounds import (
    MAX_DEPTH,
    MAX_ITEMS,
    MAX_NODES,
    is_deeper,
    is_too_much,
    size_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from server.generation.params import ApiLimits

B = TypeVar("B", bound=Body)
T = TypeVar("T")

IGNORED_HEADER = "X-Loomserve-Ignored"
IGNORED = web.RequestKey("ignored", str)  # names of fields that nobody reads
# A body may hold any number of such names, and a header some kilobytes.
MOST_TOLD = 32
BODY_SIZE = web.RequestKey("body_size", int)  # bytes, decoded


async def read_body(request: web.Request, body: type[B]) -> B:
    """The request's body. Names that nobody reads are kept for the answer's header.

    Raises: InvalidRequest: it is no JSON, or a field is wrong; with --strict-fields also one that
        nobody reads. ModelNotFound. web.HTTPRequestEntityTooLarge.
    """
    service = request.app[SERVICE]
    data = await read_decoded(request, service.config.max_body_bytes)
    request[BODY_SIZE] = len(data)
    template = service.tokenizer.chat_template
    reading = Reading(service.limits, frozenset() if template is None else template.words)
    found = await beside(request, lambda: body.read(parse_json(data), reading))
    if reading.unknown:
        if service.config.strict_fields:
            raise _unknown(next(iter(reading.unknown)), body)
        request[IGNORED] = _told(reading.unknown)
    return found


def _told(names: Collection[str]) -> str:
    """Names as a header tells them."""
    told = [quote(name[:64], safe="[].-_") for name in islice(names, MOST_TOLD)]
    more = len(names) - len(told)
    return ", ".join(told) + (f", and {more} more" if more else "")


async def beside(request: web.Request, work: Callable[[], T]) -> T:
    """What `work` gives, which goes through the body: beside the event loop where that is long."""
    lanes = request.app[SERVICE].tokenizer.lanes
    return await lanes.run(request.get(BODY_SIZE, 0), work, request.remote or "")


def read_value(body: type[B], value: Any, limits: ApiLimits) -> B:
    """A body from JSON that no request holds."""
    return body.read(value, Reading(limits))


async def read_decoded(request: web.Request, most: int) -> bytes:
    """The body without its Content-Encoding; gzip and deflate are known.

    Raises: InvalidRequest: it is not so encoded. web.HTTPUnsupportedMediaType: another encoding.
        web.HTTPRequestEntityTooLarge: it decodes to more than `most` bytes.
    """
    data = await request.read()
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return data
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise web.HTTPUnsupportedMediaType(
            text=f"the Content-Encoding {encoding[:40]!r} is not served; gzip and deflate are"
        )
    try:
        # Some send deflate without its head.
        bare = encoding == "deflate" and data[:1] and data[0] & 15 != 8
        decoder = zlib.decompressobj(-15 if bare else 47)
        decoded = await asyncio.to_thread(decoder.decompress, data, most + 1)
        if len(decoded) > most:
            raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=len(decoded))
        if decoder.eof and not decoder.unused_data:
            return decoded
    except zlib.error:
        pass
    raise InvalidRequest(f"body: cannot be decoded as its Content-Encoding {encoding!r} says")


def parse_json(data: bytes) -> Any:
    """Raises: InvalidRequest: it is no JSON, or nested too deeply.
    web.HTTPRequestEntityTooLarge: it has too many values to be parsed at once.
    """
    if len(data) > MAX_NODES and is_too_much(data):
        raise _too_many(data)
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"body: is not valid JSON: {error}") from None
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and is_deeper(value):
        raise InvalidRequest(f"body: is nested more than {MAX_DEPTH} levels deep")
    return value


def _too_many(data: bytes) -> web.HTTPRequestEntityTooLarge:
    items, nodes = size_of(data)
    return web.HTTPRequestEntityTooLarge(
        max_size=len(data),
        actual_size=len(data),
        text=f"body: has {items} commas, and {nodes} keys, lists and objects; at most {MAX_ITEMS}"
        f" and {MAX_NODES} are allowed",
    )


def _unknown(name: str, body: type[Body]) -> InvalidRequest:
    near = difflib.get_close_matches(name, body.declared, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return InvalidRequest(f"{shown(name)} is not a known field{hint}", param=name[:64])
