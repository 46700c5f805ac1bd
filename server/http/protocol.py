"""aiohttp's HTTP/1 protocol, as this server speaks it: what is no HTTP is told in JSON, too."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.web_protocol import _ErrInfo

from server.http.errors import InvalidHttp, error_answer

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("loomserve.http")

VERSIONS = (HttpVersion10, HttpVersion11)
# The parser's words for HTTP/2's first bytes, with which routers find out what a server speaks.
_PREFACE = "Pause on PRI"
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

    def data_received(self, data: bytes) -> None:
        """Hands bytes to the parser. What is found to be no HTTP within a body is told to who waits
        for that body; aiohttp tells it to nobody before the request's end, which does not come."""
        super().data_received(data)
        request = self._current_request
        if request is None or request.content.is_eof() or not self._messages:
            return
        last, _ = self._messages[-1]
        if isinstance(last, _ErrInfo):
            self._messages.pop()
            request.content.set_exception(InvalidHttp(_readable(last.message)))
            request.content.feed_eof()
            self.close()  # once that is answered

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
        what, level = _readable(message), logging.INFO
        if what.startswith(_PREFACE):
            what, level = "it begins as HTTP/2 does; HTTP/1.1 and 1.0 are served", logging.DEBUG
        log.log(level, "%s: not HTTP: %s", request.remote or "a client", what)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer is under way already")
        told = error_answer(InvalidHttp(what))
        assert told is not None
        answer = web.Response(
            status=status, body=orjson.dumps(told.body), content_type="application/json"
        )
        answer.force_close()
        return answer


def _readable(message: str | None) -> str:
    """A message of the parser's, without its pointer into the text."""
    return " ".join((message or "").replace("^", "").split())[:200]
