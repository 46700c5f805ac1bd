"""aiohttp's HTTP/1 protocol, as this server speaks it: what is no HTTP is told in JSON, too."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import HttpVersion10, HttpVersion11, web

from server.http.errors import error_body

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("loomserve.http")

VERSIONS = (HttpVersion10, HttpVersion11)
_ASKED_VERSION = web.RequestKey("version", str)


def protocol_factory(server: web.Server, **options: Any) -> Callable[[], HttpProtocol]:
    """Protocols of connections for `server` to answer. options: of `web.RequestHandler`."""
    server.request_factory = partial(_make_request, server.request_factory)
    return partial(HttpProtocol, server, loop=asyncio.get_running_loop(), **options)


def _make_request(make: Callable[..., web.BaseRequest], message: Any, *rest: Any) -> Any:
    """A request; one of a version that is not served is answered in one that is."""
    if message.version in VERSIONS:
        return make(message, *rest)
    request = make(message._replace(version=HttpVersion11, should_close=True), *rest)
    request[_ASKED_VERSION] = f"HTTP/{message.version.major}.{message.version.minor}"
    return request


def check_version(request: web.Request) -> None:
    """Raises: web.HTTPVersionNotSupported."""
    asked = request.get(_ASKED_VERSION)
    if asked is not None:
        raise web.HTTPVersionNotSupported(text=f"{asked} is not served; HTTP/1.1 and 1.0 are")


class HttpProtocol(web.RequestHandler):
    """One connection's requests."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what could not be parsed, and to what no middleware has caught.

        Raises: ConnectionError: part of an answer was sent, or the connection is lost.
        """
        if isinstance(exc, ConnectionError):
            raise exc
        if status != 400:
            return super().handle_error(request, status, exc, message)
        what = " ".join((message or "").replace("^", "").split())[:200]
        log.info("%s: not HTTP: %s", request.remote or "a client", what)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer is under way already")
        body = error_body(
            f"the request is not valid HTTP: {what}",
            kind="invalid_request_error",
            code="invalid_http",
        )
        answer = web.Response(
            status=status, body=orjson.dumps(body), content_type="application/json"
        )
        answer.force_close()
        return answer
