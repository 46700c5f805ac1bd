"""What is answered while the model is loaded: that the process lives, and takes no requests yet.

Loading keeps the main thread busy for seconds or minutes, so this has a thread and an event loop of
its own; both end before the server proper begins on the same sockets.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aiohttp import web

from server.http.connections import Connections
from server.http.errors import Loading, error_answer
from server.http.listeners import open_listener
from server.http.protocol import protocol_factory
from server.service import json_response

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Iterator, Sequence


MOST_CONNECTIONS = 256
TIMEOUT_S = 20.0


@contextmanager
def answering_probes(
    sockets: Sequence[socket.socket], tls: ssl.SSLContext | None
) -> Iterator[None]:
    """Inside the block /live answers that the process lives, everything else 503."""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    # A daemon: loading may end in any way, SystemExit and a fault in native code included.
    thread = threading.Thread(
        target=loop.run_until_complete, args=(_serve(sockets, tls, stop),), daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


async def _serve(
    sockets: Sequence[socket.socket], tls: ssl.SSLContext | None, stop: asyncio.Event
) -> None:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", _answer)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    assert runner.server is not None
    protocols = protocol_factory(runner.server, access_log=None)
    connections = Connections(
        most=MOST_CONNECTIONS,
        header_timeout_s=TIMEOUT_S,
        idle_timeout_s=TIMEOUT_S,
        unread_timeout_s=TIMEOUT_S,
    )
    # What is closed in the end are copies; the sockets go on listening.
    listeners = [await open_listener(one.dup(), protocols, connections, tls) for one in sockets]
    await stop.wait()
    for listener in listeners:
        listener.close()
    await runner.cleanup()


async def _answer(request: web.Request) -> web.Response:
    if request.path == "/live":
        response = json_response({"status": "ok"})
    else:
        answer = error_answer(Loading("the model is being loaded"))
        assert answer is not None
        response = json_response(answer.body, answer.status)
        response.headers.update(answer.headers)
    response.force_close()  # what comes next on the connection is for the server proper
    return response
