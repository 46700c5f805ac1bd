"""The aiohttp application: routes, and the middlewares every request passes."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from typing import TYPE_CHECKING

import orjson
from aiohttp import HttpVersion11, web

from server.api import (
    admin,
    chat,
    completions,
    generate,
    messages,
    models,
    page,
    responses,
    routing,
    tokens,
)
from server.api.docs import pages as docs
from server.api.incoming import IGNORED, IGNORED_HEADER
from server.api.messages_answer import anthropic_error
from server.api.routing import LOAD_FORMAT_HEADER, LOAD_HEADER, load_header
from server.http.errors import Draining, ErrorAnswer, Unauthorized, error_answer, internal_error
from server.http.listeners import open_listener
from server.http.loop_watch import watched
from server.http.protocol import check_version, protocol_factory
from server.service import REQUEST_ID, SERVICE, Service, json_response

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Awaitable, Callable, Sequence
    from typing import Any

    from server.http.listeners import Listener

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger("loomserve.http")
access = logging.getLogger("loomserve.access")

PROTOCOLS = (
    *(chat, completions, responses, messages, generate, models, tokens, routing, admin, docs),
    page,
)
# Probes and scrapers carry no key, and must be answered while the server drains. The page's files
# hold nothing of this server's.
OPEN_PATHS = ("/health", "/live", "/ready", "/ping", "/metrics", "/")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_CORS_HEADERS = {
    "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
    "Access-Control-Allow-Headers": "*, Authorization",
    "Access-Control-Max-Age": "600",
}


def make_app(service: Service) -> web.Application:
    """The application around a service whose engine is running."""
    app = web.Application(
        middlewares=[observe, errors, guard], client_max_size=service.config.max_body_bytes
    )
    app[SERVICE] = service
    app.on_response_prepare.append(add_headers)
    app.cleanup_ctx.append(watched(service.metrics.loop_beat))
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


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives the request its id, watches its connection, and writes the access log."""
    service = request.app[SERVICE]
    given = request.headers.get("X-Request-Id", "")
    request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
    _name_task(request)
    service.connections.busy(request.transport)
    started = time.perf_counter()
    status = 499  # the client left before there was a status
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        service.connections.idle(request.transport)
        if service.config.access_log:
            access.info("%s", _access_line(request, status, time.perf_counter() - started))


def _name_task(request: web.Request) -> None:
    """Names the task after its request, for the log of what holds up the loop."""
    resource = request.match_info.route.resource
    path = "an unknown path" if resource is None else resource.canonical
    task = asyncio.current_task()
    assert task is not None
    task.set_name(f"{request.method} {path} of request {request[REQUEST_ID]}")


def _access_line(request: web.Request, status: int, seconds: float) -> str:
    """One line of JSON; neither bodies nor query strings nor keys."""
    line = {
        "time": round(time.time(), 3),
        "request_id": request[REQUEST_ID],
        "remote": request.remote,
        "method": request.method,
        "path": request.path,
        "status": status,
        "seconds": round(seconds, 4),
    }
    return orjson.dumps(line).decode()


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns every exception into an error body of the path's protocol."""
    try:
        return await handler(request)
    except (asyncio.CancelledError, ConnectionError):
        raise
    except web.HTTPException as error:
        answer = error_answer(error)
        if answer is None:  # a redirect or the like is an answer, not an error
            raise
    except Exception as error:
        answer = error_answer(error)
        if answer is None:
            log.exception("%s %s failed", request.method, request.path)
            answer = internal_error()
    return _error_response(request, answer)


def _error_response(request: web.Request, answer: ErrorAnswer) -> web.Response:
    request.app[SERVICE].metrics.refused(answer.status)
    body = answer.body
    if request.path.startswith("/v1/messages"):  # Anthropic's clients read another form
        body = anthropic_error(answer)
    response = json_response(body, answer.status)
    response.headers.update(answer.headers)
    return response


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Preflights, keys, and refusals while the server drains; a body must come in time."""
    service = request.app[SERVICE]
    check_version(request)
    if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
        return web.Response(status=204)
    if request.path not in OPEN_PATHS and not request.path.startswith("/page/"):
        _check_key(request, service.config.api_key)
        if service.draining and request.method == "POST":
            raise Draining
    _check_origin(request, service.config.cors_allow_origins)
    if request.can_read_body:
        try:
            async with asyncio.timeout(service.config.body_timeout):
                await request.read()  # kept by aiohttp for the handler
        except TimeoutError:
            raise web.HTTPRequestTimeout(
                text=f"the body did not arrive within {service.config.body_timeout:g} s"
            ) from None
    interim = request.version >= HttpVersion11
    service.connections.received(request.transport, interim=interim)
    return await handler(request)


def _check_key(request: web.Request, key: str | None) -> None:
    """Raises: Unauthorized. Compares digests, so the time taken tells nothing of the key."""
    if key is None:
        return
    given = request.headers.get("X-Api-Key")
    if given is None:
        scheme, _, rest = request.headers.get("Authorization", "").partition(" ")
        given = rest.strip() if scheme.lower() == "bearer" else None
    if given is None:
        raise Unauthorized("no API key was given; send it as Authorization: Bearer KEY")
    wanted = hashlib.sha256(key.encode()).digest()
    if not hmac.compare_digest(hashlib.sha256(given.encode("utf-8", "replace")).digest(), wanted):
        raise Unauthorized("the API key is wrong")


def _check_origin(request: web.Request, allowed: str) -> None:
    """A page of an origin that is not allowed may order nothing.

    Browsers ask first before they send JSON to another origin, and are not allowed to; what they
    send without asking (forms, plain text, an empty body) must not be taken for an order.

    Raises: web.HTTPUnsupportedMediaType.
    """
    origin = request.headers.get("Origin")
    if origin is None or request.method in ("GET", "HEAD", "OPTIONS"):
        return
    own = origin.partition("://")[2] == request.host
    if own or _allowed_origin(origin, allowed) or request.content_type == "application/json":
        return
    raise web.HTTPUnsupportedMediaType(
        text=f"requests of the origin {origin[:100]} must have the Content-Type application/json"
    )


def _allowed_origin(origin: str, allowed: str) -> str | None:
    """What Access-Control-Allow-Origin says to an origin; None: nothing."""
    names = [one.strip() for one in allowed.split(",")]
    return "*" if "*" in names else origin if origin in names else None


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Headers of every answer, streams included: the request's id, the load where it was asked for,
    and CORS where it is on."""
    request.app[SERVICE].connections.answering(request.transport)
    response.headers["X-Request-Id"] = request.get(REQUEST_ID, "")
    if IGNORED in request:
        response.headers[IGNORED_HEADER] = request[IGNORED]
    load_format = request.headers.get(LOAD_FORMAT_HEADER)
    if load_format is not None:
        load = load_header(request.app[SERVICE].engine.load(), load_format)
        if load is not None:
            response.headers[LOAD_HEADER] = load
    origin = request.headers.get("Origin")
    if origin is None:
        return
    allowed = _allowed_origin(origin, request.app[SERVICE].config.cors_allow_origins)
    if allowed is None:
        return
    response.headers["Access-Control-Allow-Origin"] = allowed
    if allowed != "*":
        response.headers["Vary"] = "Origin"
    response.headers.update(_CORS_HEADERS)
    response.headers["Access-Control-Expose-Headers"] = (
        f"X-Request-Id, Retry-After, {IGNORED_HEADER}"
    )
