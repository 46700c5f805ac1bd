"""Connections before and between requests: how many there are, and how long they may do nothing.

aiohttp limits neither the number of connections nor the time a request head may take, so this
wraps its protocol factory. A connection is idle until a request's head has arrived, and again once
its answer is sent; an idle one that overstays is closed.

A client that ends its side of a connection may have left, or may only have nothing more to say. TCP
does not tell which before something is sent; what is done then is in `_Connection._begin_asking`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import orjson

from server.http.errors import error_body
from server.http.sockets import can_tell_reset, is_reset

if TYPE_CHECKING:
    from collections.abc import Callable

# A connection whose client has ended its side, and from which no whole request has been read, is
# closed after this: what it sent before has long reached the parser.
TURN_S = 0.01  # in which the event loop looks at its sockets once more
GRACE_S = 0.5
# A client that may have left is looked at after these times: its reset takes a round trip.
FIRST_LOOK_S, LATER_LOOKS_S = 0.05, 1.0


class Connections:
    """All open connections.

    Args:
        most: further connections are answered 503 and closed.
        header_timeout_s: for the first request's head; idle_timeout_s: for each later one.
        unread_timeout_s: how long a client may leave unread what was sent before the close.

    Attributes:
        handshakes: connections that are not open yet, and count (see `listeners`).
    """

    def __init__(
        self,
        *,
        most: int,
        header_timeout_s: float,
        idle_timeout_s: float,
        unread_timeout_s: float,
    ) -> None:
        self.most = most
        self.header_timeout_s = header_timeout_s
        self.idle_timeout_s = idle_timeout_s
        self.unread_timeout_s = unread_timeout_s
        self.handshakes = 0
        self._open: dict[asyncio.BaseTransport | None, _Connection] = {}

    def __len__(self) -> int:
        return len(self._open) + self.handshakes

    @property
    def unsent_bytes(self) -> list[int]:
        """For each connection, the bytes of answers that its client has not taken yet."""
        return [connection.unsent_bytes for connection in self._open.values()]

    @property
    def full(self) -> bool:
        return len(self) >= self.most

    def guard(self, factory: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """A protocol factory whose connections are counted and timed."""
        return lambda: _Connection(factory(), self)

    def busy(self, transport: asyncio.BaseTransport | None) -> None:
        """A request's head has arrived: the handler is responsible from here on."""
        if transport in self._open:
            self._open[transport].busy()

    def received(self, transport: asyncio.BaseTransport | None, *, interim: bool) -> None:
        """The whole request has. interim: whether its client knows interim answers (HTTP/1.1)."""
        if transport in self._open:
            self._open[transport].received(interim=interim)

    def answering(self, transport: asyncio.BaseTransport | None) -> None:
        """The head of the answer is about to be sent."""
        if transport in self._open:
            self._open[transport].answering()

    def idle(self, transport: asyncio.BaseTransport | None) -> None:
        """A request was answered: the connection may wait for the next one."""
        if transport in self._open:
            self._open[transport].idle()

    def opened(self, transport: asyncio.Transport, connection: _Connection) -> bool:
        """Counts a connection; False, and it is refused, where there are too many."""
        shook_hands = transport.get_extra_info("sslcontext") is not None  # counted before
        if self.full and not shook_hands:
            transport.write(_refusal(self.most))
            transport.close()
            return False
        self._open[transport] = connection
        return True

    def closed(self, transport: asyncio.BaseTransport) -> None:
        del self._open[transport]


class _Connection(asyncio.Protocol):
    """Hands everything on to aiohttp's protocol, unless the connection is refused."""

    def __init__(self, inner: asyncio.Protocol, connections: Connections) -> None:
        self._inner = inner
        self._connections = connections
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        self._taken = False
        self._unread = False  # something came since the last answer
        self._ended = False  # the client has ended its side
        self._received = False  # a whole request is being answered
        self._interim = False  # and its client knows interim answers
        self._answering = False  # and its answer has begun

    @property
    def unsent_bytes(self) -> int:
        return 0 if self._transport.is_closing() else self._transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, no check: uvloop's transports derive from nothing of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._taken = self._connections.opened(self._transport, self)
        if self._taken:
            self._close_after(self._connections.header_timeout_s)
            self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._taken:
            self._unread = True
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Whether the connection stays open for what is still to be answered."""
        if not self._taken or self._transport.get_extra_info("sslcontext") is not None:
            return None  # TLS knows no half of a connection
        self._ended = True
        if self._received:
            self._begin_asking()
        elif self._unread:
            self._close_after(GRACE_S)
        return self._received or self._unread

    def connection_lost(self, error: Exception | None) -> None:
        if self._taken:
            self._stop_timer()
            self._connections.closed(self._transport)
            self._inner.connection_lost(error)

    def pause_writing(self) -> None:
        if self._taken:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._taken:
            self._inner.resume_writing()

    def busy(self) -> None:
        if not self._ended:
            self._stop_timer()

    def received(self, *, interim: bool) -> None:
        self._received = True
        self._interim = interim
        if self._ended:
            self._begin_asking()

    def answering(self) -> None:
        if not self._received:  # a whole answer, which is sent after its handler's end
            return
        self._answering = True
        if self._ended:
            self._begin_asking()

    def idle(self) -> None:
        self._received = self._answering = self._unread = False
        self._close_after(GRACE_S if self._ended else self._connections.idle_timeout_s)

    def _begin_asking(self) -> None:
        """Finds out whether the client is still there for its answer: who has left resets the
        connection as soon as anything is sent, be it the answer or an interim one. Where neither
        can be, or a reset is not seen, an answer that is not there in a moment is given up."""
        if not can_tell_reset(self._transport) or not (self._answering or self._interim):
            self._close_after(GRACE_S)
            return
        self._after(FIRST_LOOK_S, self._ask)

    def _ask(self) -> None:
        if not self._answering:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._look(FIRST_LOOK_S)

    def _look(self, seconds: float) -> None:
        if is_reset(self._transport):
            self._transport.abort()
        else:
            longer = min(2 * seconds, LATER_LOOKS_S)
            self._after(seconds, lambda: self._look(longer))

    def _close_after(self, seconds: float) -> None:
        # What came while the loop was held up is read after its timers are looked at.
        self._after(seconds, lambda: self._after(TURN_S, self._close))

    def _close(self) -> None:
        """Closes once all is sent that was written, which a client that does not read prevents."""
        self._transport.close()
        unsent = self._transport.get_write_buffer_size()
        self._after(self._connections.unread_timeout_s, lambda: self._give_up(unsent))

    def _give_up(self, unsent: int) -> None:
        """Ends the connection, unless its client has read some of what was unsent."""
        if self._transport.get_write_buffer_size() < unsent:
            self._close()
        else:
            self._transport.abort()

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, act)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


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
