"""/debug/live: samples of what the server does, as events, for as long as somebody reads them."""

from __future__ import annotations

from aiohttp import web

from runtime.errors import InvalidRequest
from server.http.sse import EventStream
from server.service import SERVICE


async def live(request: web.Request) -> web.StreamResponse:
    """GET /debug/live[?samples=N]: an event per sample. A reader that is slow loses samples."""
    service = request.app[SERVICE]
    left = _samples(request.query.get("samples"))
    out = EventStream(request, service.config.slow_reader_timeout)
    watcher = service.live.watch()
    try:
        while left is None or left > 0:
            sample = await watcher.take()
            if sample is None:
                break
            await out.send(b"data: " + sample + b"\n\n")
            left = None if left is None else left - 1
        return await out.end()
    except ConnectionError:
        return out.response
    finally:
        service.live.leave(watcher)


def _samples(given: str | None) -> int | None:
    if given is None:
        return None
    if not given.isdecimal() or not 1 <= len(given) <= 6 or not int(given):
        raise InvalidRequest(
            f"samples: got {given[:40]!r}, must be a number from 1 to 999999", param="samples"
        )
    return int(given)


async def end_live(app: web.Application) -> None:
    """The server stops: nobody who watches holds it up."""
    app[SERVICE].live.close()


ROUTES = [web.get("/debug/live", live)]
