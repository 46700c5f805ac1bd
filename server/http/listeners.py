"""Taking connections from a listening socket, plain ones and those of TLS."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Protocol

from server.http.sockets import BACKLOG

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from server.http.connections import Connections

log = logging.getLogger("loomserve.http")

# For the other side to agree to the end of a TLS connection.
TLS_SHUTDOWN_S = 2.0
# Where the machine has no file, port or memory left for a connection.
ACCEPT_AGAIN_S = 0.5


class Listener(Protocol):
    def close(self) -> None:
        """Takes no further connections; those that are open stay so."""
        ...


async def open_listener(
    sock: socket.socket,
    factory: Callable[[], asyncio.Protocol],
    connections: Connections,
    tls: ssl.SSLContext | None,
) -> Listener:
    """Gives each connection of the socket a protocol, counted and timed by `connections`."""
    guarded = connections.guard(factory)
    if tls is not None:
        return TlsListener(sock, guarded, connections, tls)
    loop = asyncio.get_running_loop()
    # A path is not an address to asyncio.
    unix = sock.family == socket.AF_UNIX
    create = loop.create_unix_server if unix else loop.create_server
    return await create(guarded, sock=sock, backlog=BACKLOG)


class TlsListener:
    """Counts a connection from its handshake's begin, which the event loops' own servers show to
    nobody. Those beyond the limit are closed before any handshake."""

    def __init__(
        self,
        sock: socket.socket,
        factory: Callable[[], asyncio.Protocol],
        connections: Connections,
        tls: ssl.SSLContext,
    ) -> None:
        self._sock = sock
        self._factory = factory
        self._connections = connections
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        self._accepting.add_done_callback(lambda _: self._sock.close())  # which it still watches
        for task in (self._accepting, *self._tasks):
            task.cancel()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._sock)
            except OSError as error:
                log.warning("no further connection can be taken at present: %s", error)
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            if self._connections.full:
                connection.close()
                continue
            task = asyncio.create_task(self._shake_hands(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _shake_hands(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._connections.handshakes += 1
        try:
            await loop.connect_accepted_socket(
                self._factory,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=self._connections.header_timeout_s,
                ssl_shutdown_timeout=TLS_SHUTDOWN_S,
            )
        except OSError as error:  # it speaks no TLS, takes too long, or has left
            log.debug("a TLS handshake failed: %s", error)
        finally:
            self._connections.handshakes -= 1
