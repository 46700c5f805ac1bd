"""Connections in memory: what clients and the server write arrives late, in pieces, or never.

A connection has two directions of bounded capacity, like the buffers of two kernels. The server's
end is an asyncio transport, the client's end is awaited by a script. Ends close as TCP's do: one
side (a client that shuts down its writing may still read), both (what is sent to a closed end is
answered by a reset), or at once by a reset.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random

_ESTABLISHED, _CLOSED = 1, 7  # of Linux's tcp_info
HIGH_WATER = 64 * 1024


class Network:
    """All connections to one server.

    Args: told: told of every piece that arrives anywhere: (connection, direction, bytes).
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        told: Callable[[int, str, bytes], None],
    ) -> None:
        self.loop = loop
        self.rng = rng
        self.told = told
        self.connections: list[Connection] = []
        self._factory: Callable[[], asyncio.BaseProtocol] | None = None

    def listen(self, factory: Callable[[], asyncio.BaseProtocol]) -> Listener:
        self._factory = factory
        return Listener(self)

    def stop_listening(self) -> None:
        self._factory = None

    async def connect(self, *, capacity: int) -> Connection:
        """A new connection. Args: capacity: bytes that may be on the way to the client.

        Raises: ConnectionRefusedError: nobody listens.
        """
        await asyncio.sleep(self.delay())
        if self._factory is None:
            raise ConnectionRefusedError
        connection = Connection(self, len(self.connections), capacity)
        self.connections.append(connection)
        connection.server.open(self._factory())
        return connection

    def delay(self) -> float:
        """What a piece takes to the other end."""
        return self.rng.choice((0.0, 0.0, 0.0005, 0.004))


class Listener:
    def __init__(self, network: Network) -> None:
        self._network = network

    def close(self) -> None:
        self._network.stop_listening()


class ListeningSocket:
    """What the server is given to listen on: it only has a name."""

    family = socket.AF_INET

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 80


class _Socket:
    """What is asked of a connection's socket beside its transport."""

    family = socket.AF_INET

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def setsockopt(self, *args: Any) -> None:
        """Options change nothing here."""

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        return bytes([_CLOSED if self._connection.reset_seen else _ESTABLISHED])


class Connection:
    """One connection, as its client holds it.

    Attributes:
        server: the transport at the other end.
        reset_seen: the server's kernel knows that there is nobody any more.
        lost: the server has told its protocol that the connection is over, so many times.
        over: set then.
    """

    def __init__(self, network: Network, number: int, capacity: int) -> None:
        self.network = network
        self.number = number
        self.capacity = capacity
        self.reset_seen = False
        self.lost = 0
        self.server = ServerTransport(self)
        self._arrived = bytearray()
        self._ended = False  # the server has ended its side
        self._reset = False  # the server has reset the connection
        self._closed = False  # this end is closed for both directions
        self._news = asyncio.Event()
        self.over = asyncio.Event()

    async def send(self, data: bytes) -> None:
        """Gives a piece to the network. Raises: ConnectionError: the server has gone."""
        await asyncio.sleep(self.network.delay())
        if self._reset or self.server.gone:
            raise ConnectionResetError
        self.server.receive(data)

    async def receive(self, most: int) -> bytes:
        """What has arrived, at most so much; empty at the end.

        Raises: ConnectionResetError.
        """
        while not self._arrived and not self._ended and not self._reset:
            self._news.clear()
            await self._news.wait()
        if not self._arrived and self._reset:
            raise ConnectionResetError
        data = bytes(self._arrived[:most])
        del self._arrived[: len(data)]
        self.network.told(self.number, "<", data)
        if data:
            self.server.drain_soon()
        return data

    def shut_down(self) -> None:
        """Nothing more will be sent; what comes is still read."""
        self.server.receive_end()

    def close(self) -> None:
        """Leaves. What the server sends from now on is answered by a reset."""
        if not self._closed:
            self._closed = True
            unread = bool(self._arrived)
            self._arrived.clear()
            if unread:
                self.server.receive_reset()
            else:
                self.server.receive_end()
                self.server.drain_soon()

    def reset(self) -> None:
        """Leaves at once."""
        if not self._closed:
            self._closed = True
            self.server.receive_reset()

    @property
    def room(self) -> int:
        return self.capacity - len(self._arrived)

    def arrive(self, data: bytes) -> None:
        if self._closed:
            self.network.loop.call_later(self.network.delay(), self.server.receive_reset)
        else:
            self._arrived += data
            self._news.set()

    def end(self, *, reset: bool) -> None:
        self._reset |= reset and not self._ended
        self._ended |= not reset
        self._news.set()
        self.over.set()

    @property
    def closed(self) -> bool:
        return self._closed


class ServerTransport(asyncio.Transport):
    """The server's end: asyncio's selector transport, as far as a protocol can tell."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        super().__init__(extra={"socket": _Socket(connection), "peername": ("192.0.2.1", 4000)})
        self._network = connection.network
        self._loop = connection.network.loop
        self._protocol: asyncio.BaseProtocol
        self._incoming: list[bytes] = []
        self._outgoing = bytearray()
        self._end_is_near = False  # the client's end of sending comes after what is incoming
        self._end_told = False
        self._closing = False
        self._over = False
        self._paused = False
        self._full = False  # the protocol was told to pause
        self._high, self._low = HIGH_WATER, HIGH_WATER // 4
        self._draining = False

    def open(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        protocol.connection_made(self)

    @property
    def gone(self) -> bool:
        return self._over

    def receive(self, data: bytes) -> None:
        self._incoming.append(data)
        self._loop.call_soon(self._deliver)

    def receive_end(self) -> None:
        self._end_is_near = True
        self._loop.call_later(self._network.delay(), self._deliver)

    def receive_reset(self) -> None:
        """What is known of it: a transport that reads is told at once, others when they write."""
        if not self._connection.reset_seen:
            self._connection.reset_seen = True
            self._incoming.clear()
            if not self._paused and not self._end_told:
                self._fail(ConnectionResetError(104, "Connection reset by peer"))

    def _deliver(self) -> None:
        while self._incoming and not self._paused and not self._closing:
            data = self._incoming.pop(0)
            self._network.told(self._connection.number, ">", data)
            assert isinstance(self._protocol, asyncio.Protocol)
            self._protocol.data_received(data)
        if self._incoming or self._paused or self._closing or not self._end_is_near:
            return
        if self._connection.reset_seen:
            self._fail(ConnectionResetError(104, "Connection reset by peer"))
        elif not self._end_told:
            self._end_told = True
            assert isinstance(self._protocol, asyncio.Protocol)
            if not self._protocol.eof_received():
                self.close()

    def write(self, data: Any) -> None:
        assert not self._over or self._closing
        if self._over or (self._closing and not self._outgoing and self._connection.reset_seen):
            return
        if self._connection.reset_seen:
            self._fail(BrokenPipeError(32, "Broken pipe"))
            return
        self._outgoing += data
        self._drain()
        if len(self._outgoing) > self._high and not self._full:
            self._full = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def _drain(self) -> None:
        """Hands on what there is room for; not always all of that at once."""
        room = self._connection.room
        if self._connection.closed:
            room = len(self._outgoing)
        if room > 1 and self._network.rng.random() < 0.2:
            room = self._network.rng.randint(1, room)
        piece = bytes(self._outgoing[:room])
        if piece:
            del self._outgoing[: len(piece)]
            self._connection.arrive(piece)
        if self._full and len(self._outgoing) <= self._low:
            self._full = False
            self._protocol.resume_writing()
        if self._outgoing:
            if self._connection.room > 0:
                self.drain_soon()
        elif self._closing:
            self._finish(None)

    def drain_soon(self) -> None:
        if not self._draining:
            self._draining = True
            self._loop.call_later(self._network.delay(), self._drain_now)

    def _drain_now(self) -> None:
        self._draining = False
        if self._over:
            return
        if self._connection.reset_seen and self._outgoing:
            self._fail(BrokenPipeError(32, "Broken pipe"))
        else:
            self._drain()

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            if not self._outgoing:
                self._finish(None)

    def abort(self) -> None:
        self._fail(None)

    def _fail(self, error: Exception | None) -> None:
        self._closing = True
        self._outgoing.clear()
        self._finish(error, reset=True)

    def _finish(self, error: Exception | None, *, reset: bool = False) -> None:
        if not self._over:
            self._over = True
            self._loop.call_soon(self._tell_lost, error, reset or bool(self._incoming))

    def _tell_lost(self, error: Exception | None, reset: bool) -> None:
        self._connection.lost += 1
        self._connection.end(reset=reset)
        self._protocol.connection_lost(error)

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._loop.call_soon(self._deliver)

    def is_reading(self) -> bool:
        return not self._paused and not self._closing

    def get_write_buffer_size(self) -> int:
        return len(self._outgoing)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_WATER if high is None else high
        self._low = self._high // 4 if low is None else low

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def can_write_eof(self) -> bool:
        return False
