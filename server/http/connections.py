"""Connections before and between requests: how many there are, and how long they may do nothing.

aiohttp limits neither the number of connections nor the time a request head may take, so this
wraps its protocol factory. A connection is idle until a request's head has arrived, and again once
its answer is sent; an idle one that overstays is closed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import orjson

from server.http.errors import error_body

if TYPE_CHECKING:
    from collections.abc import Callable


class Connections:
    """All open connections.

    Args:
        most: further connections are answered 503 and closed.
        header_timeout_s: for the first request's head; idle_timeout_s: for each later one.
    """

    def __init__(self, *, most: int, header_timeout_s: float, idle_timeout_s: float) -> None:
        self.most = most
        self.header_timeout_s = header_timeout_s
        self.idle_timeout_s = idle_timeout_s
        self._timers: dict[asyncio.BaseTransport, asyncio.TimerHandle | None] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def guard(self, factory: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """A protocol factory whose connections are counted and timed."""
        return lambda: _Guarded(factory(), self)

    def busy(self, transport: asyncio.BaseTransport | None) -> None:
        """A request's head has arrived: the handler is responsible from here on."""
        if transport in self._timers:
            self._stop_timer(transport)

    def idle(self, transport: asyncio.BaseTransport | None) -> None:
        """A request was answered: the connection may wait for the next one."""
        if transport in self._timers:
            self._start_timer(transport, self.idle_timeout_s)

    def opened(self, transport: asyncio.Transport) -> bool:
        """Counts a connection; False, and it is refused, where there are too many."""
        if len(self._timers) >= self.most:
            transport.write(_refusal(self.most))
            transport.close()
            return False
        self._start_timer(transport, self.header_timeout_s)
        return True

    def closed(self, transport: asyncio.BaseTransport) -> None:
        self._stop_timer(transport)
        del self._timers[transport]

    def _start_timer(self, transport: asyncio.BaseTransport, seconds: float) -> None:
        self._stop_timer(transport)
        loop = asyncio.get_running_loop()
        self._timers[transport] = loop.call_later(seconds, transport.close)

    def _stop_timer(self, transport: asyncio.BaseTransport) -> None:
        timer = self._timers.get(transport)
        if timer is not None:
            timer.cancel()
            self._timers[transport] = None


class _Guarded(asyncio.Protocol):
    """Hands everything on to aiohttp's protocol, unless the connection is refused."""

    __slots__ = ("_connections", "_inner", "_taken", "_transport")

    def __init__(self, inner: asyncio.Protocol, connections: Connections) -> None:
        self._inner = inner
        self._connections = connections
        self._transport: asyncio.BaseTransport | None = None
        self._taken = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        # A cast, no check: uvloop's transports derive from nothing of asyncio's.
        self._taken = self._connections.opened(cast("asyncio.Transport", transport))
        if self._taken:
            self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._taken:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._taken else None

    def connection_lost(self, error: Exception | None) -> None:
        if self._taken:
            assert self._transport is not None
            self._connections.closed(self._transport)
            self._inner.connection_lost(error)

    def pause_writing(self) -> None:
        if self._taken:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._taken:
            self._inner.resume_writing()


def _refusal(most: int) -> bytes:
    body = orjson.dumps(
        error_body(
            f"the server has {most} open connections, which is its limit; retry later",
            kind="overloaded_error",
            code="too_many_connections",
        )
    )
    return (
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
