"""Taking the port: before anything slow is done, so that a taken one is told at once."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import stat
from typing import TYPE_CHECKING

from runtime.errors import ConfigError

if TYPE_CHECKING:
    import asyncio

BACKLOG = 2048
# Linux keeps twice as many, its own records among them. A large body takes longer over a long way
# for it; a flood of small chunks is parsed in shorter turns.
RECEIVE_BYTES = 1 << 15
_TCP_CLOSE = 7  # of Linux's tcp_info, whose first byte is the state


def allow_files(count: int) -> int:
    """Raises this process's limit of open files to `count`, as far as it may. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return count
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS has a limit beside the one it tells
        return soft
    return wanted


def listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets of every address that the host name has; port 0 takes a free one.

    Raises: ConfigError: naming the address that cannot be used.
    """
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG
        )
    except OSError as error:
        raise ConfigError(f"host {host!r}: {error.strerror or error}") from None
    sockets: list[socket.socket] = []
    try:
        for family, kind, proto, _, address in dict.fromkeys(found):
            taken = sockets[0].getsockname()[1] if sockets else port
            sockets.append(_listen(family, kind, proto, (address[0], taken, *address[2:])))
    except OSError as error:
        for one in sockets:
            one.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}"
        ) from None
    return sockets


def _listen(family: int, kind: int, proto: int, address: tuple[str | int, ...]) -> socket.socket:
    sock = socket.socket(family, kind, proto)
    try:
        # A restart right after a stop finds old connections of the port still closing.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections take it from here. What one read returns is parsed in one turn of the loop.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        # Listening at once: two sockets may share a bound address as long as neither listens.
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def listen_on_path(path: str) -> list[socket.socket]:
    """A listening unix socket. One that a server has left behind is replaced, one that somebody
    answers on is not, and nothing else is ever removed.

    Raises: ConfigError: naming the path that cannot be used.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_abandoned(path):
            os.unlink(path)
        sock.bind(path)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot listen on {path}: {reason}") from None
    return [sock]


def _is_abandoned(path: str) -> bool:
    """Whether this is a unix socket on which nobody listens."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED


def forget_path(path: str) -> None:
    """Removes the socket of a server that has ended."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def base_url(sockets: list[socket.socket], *, tls: bool) -> str:
    """An address that a client on this machine can use. Over a unix socket the host in it is a name
    only."""
    if sockets[0].family == socket.AF_UNIX:
        return f"{'https' if tls else 'http'}://localhost"
    host, port = sockets[0].getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def can_tell_reset(transport: asyncio.BaseTransport) -> bool:
    """Whether a reset of this connection is seen without reading from it."""
    # Writing to a unix socket whose other end is closed fails at once.
    return _family(transport) == socket.AF_UNIX or hasattr(socket, "TCP_INFO")


def is_reset(transport: asyncio.BaseTransport) -> bool:
    """Whether the other side has reset the connection, where `can_tell_reset`."""
    if transport.is_closing() or _family(transport) == socket.AF_UNIX:
        return False  # the event loop knows of it, or will on writing
    sock = transport.get_extra_info("socket")
    state: bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return state[0] == _TCP_CLOSE


def _family(transport: asyncio.BaseTransport) -> int:
    family: int = transport.get_extra_info("socket").family
    return family
