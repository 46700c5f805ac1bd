"""The aiohttp application: its routes, and how it listens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from server.api import (
    admin,
    chat,
    completions,
    generate,
    live,
    messages,
    models,
    page,
    responses,
    routing,
    simulator,
    tokens,
    trace,
)
from server.api.docs import pages as docs
from server.http.listeners import open_listener
from server.http.loop_watch import watched
from server.http.protocol import protocol_factory
from server.middlewares import add_headers, errors, guard, observe
from server.service import SERVICE, Service

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Sequence
    from typing import Any

    from server.http.listeners import Listener

PROTOCOLS = (
    *(chat, completions, responses, messages, generate, models, tokens, routing, admin, docs),
    *(live, trace, page, simulator),
)


def make_app(service: Service) -> web.Application:
    """The application around a service whose engine is running."""
    app = web.Application(
        middlewares=[observe, errors, guard], client_max_size=service.config.max_body_bytes
    )
    app[SERVICE] = service
    app.on_response_prepare.append(add_headers)
    app.cleanup_ctx.append(watched(service.metrics.loop_beat))
    app.on_shutdown.append(live.end_live)
    for protocol in PROTOCOLS:
        app.add_routes(protocol.ROUTES)
    return app


def app_runner(service: Service, **options: Any) -> web.AppRunner:
    """What serves the application. options: further ones of aiohttp's runner."""
    return web.AppRunner(
        make_app(service),
        handler_cancellation=True,  # a client that leaves must free its pages
        **options,
    )


async def start_listening(
    service: Service,
    runner: web.AppRunner,
    sockets: Sequence[socket.socket],
    tls: ssl.SSLContext | None = None,
) -> list[Listener]:
    """Answers on the sockets until the listeners are closed. runner: is set up."""
    assert runner.server is not None
    protocols = protocol_factory(
        runner.server,
        keepalive_timeout=service.config.idle_timeout,
        access_log=None,
        auto_decompress=False,  # incoming.py does, and answers in JSON where it cannot
    )
    return [await open_listener(sock, protocols, service.connections, tls) for sock in sockets]
