"""/debug/trace: what the server does in its next steps, for Perfetto."""

from __future__ import annotations

from aiohttp import web

from runtime.errors import InvalidRequest
from server.service import SERVICE

MAX_STEPS = 10_000
MAX_SECONDS = 60
STEPS, SECONDS = 200, 10  # where none are given


async def trace(request: web.Request) -> web.Response:
    """GET /debug/trace[?steps=N][&seconds=S]: a trace of so many steps, or of those that come in
    the time."""
    steps = _number(request, "steps", STEPS, MAX_STEPS)
    seconds = _number(request, "seconds", SECONDS, MAX_SECONDS)
    body = await request.app[SERVICE].tracing.capture(steps, seconds)
    return web.Response(
        body=body,
        content_type="application/json",
        headers={"Content-Disposition": 'attachment; filename="loomserve-trace.json"'},
    )


def _number(request: web.Request, name: str, default: int, most: int) -> int:
    given = request.query.get(name, str(default))
    if not given.isascii() or not given.isdecimal() or not 1 <= int(given[:9]) <= most:
        raise InvalidRequest(
            f"{name}: got {given[:40]!r}, must be a number from 1 to {most}", param=name
        )
    return int(given)


ROUTES = [web.get("/debug/trace", trace)]
