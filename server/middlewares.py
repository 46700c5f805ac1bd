"""What every request passes: it gets an id and a line in the log, errors become answers, and who
may not ask, or asks too slowly, is turned away.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import orjson
from aiohttp import HttpVersion11, web

from server.api.incoming import IGNORED, IGNORED_HEADER
from server.api.messages_answer import anthropic_error
from server.api.routing import LOAD_FORMAT_HEADER, LOAD_HEADER, load_header
from server.http.api_key import check_key
from server.http.errors import Draining, ErrorAnswer, error_answer, internal_error
from server.http.origins import check_origin, cors_headers, is_preflight
from server.http.protocol import check_version
from server.observability.request_report import report_of
from server.service import GENERATION, RECEIVED, REQUEST_ID, SERVICE, json_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from server.observability.request_report import RequestReport

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger("loomserve.http")
access = logging.getLogger("loomserve.access")

# Probes and scrapers carry no key, and must be answered while the server drains. The page's files
# hold nothing of this server's.
OPEN_PATHS = ("/health", "/live", "/ready", "/ping", "/metrics", "/", "/simulator")
OPEN_FOLDERS = ("/page/", "/simulator/")
EXPOSED_HEADERS = ("X-Request-Id", "Retry-After", IGNORED_HEADER)
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives the request its id, watches its connection, and writes the access log."""
    service = request.app[SERVICE]
    given = request.headers.get("X-Request-Id", "")
    request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
    request[RECEIVED] = service.engine.clock()
    _name_task(request)
    service.connections.busy(request.transport)
    status = 499  # the client left before there was a status
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        service.connections.idle(request.transport)
        if service.reports and GENERATION in request:
            service.reports.tell(_report(request, status))
        if service.config.access_log:
            access.info("%s", _access_line(request, status))


def _name_task(request: web.Request) -> None:
    """Names the task after its request, for the log of what holds up the loop."""
    resource = request.match_info.route.resource
    path = "an unknown path" if resource is None else resource.canonical
    task = asyncio.current_task()
    assert task is not None
    task.set_name(f"{request.method} {path} of request {request[REQUEST_ID]}")


def _report(request: web.Request, status: int) -> RequestReport:
    return report_of(
        request[GENERATION],
        request_id=request[REQUEST_ID],
        path=request.path,
        status=status,
        ended_s=request.app[SERVICE].engine.clock(),
        headers=request.headers,
    )


def _access_line(request: web.Request, status: int) -> str:
    """One line of JSON, with tokens and timings where something was generated; neither bodies nor
    query strings nor keys."""
    seconds = request.app[SERVICE].engine.clock() - request[RECEIVED]
    line = {
        "time": round(time.time(), 3),
        "request_id": request[REQUEST_ID],
        "remote": request.remote,
        "method": request.method,
        "path": request.path,
        "status": status,
        "seconds": round(seconds, 4),
    }
    if GENERATION in request:
        usage = request[GENERATION].usage()
        line["prompt_tokens"] = usage.prompt_tokens
        line["completion_tokens"] = usage.completion_tokens
        line["timings"] = asdict(request[GENERATION].timings())
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
    if is_preflight(request):
        return web.Response(status=204)
    if request.path not in OPEN_PATHS and not request.path.startswith(OPEN_FOLDERS):
        check_key(request, service.config.api_key)
        if service.draining and request.method == "POST":
            raise Draining
    check_origin(request, service.config.cors_allow_origins)
    if not request.can_read_body:
        return await _received(request, handler)
    with service.bodies.held(request.content_length):
        try:
            async with asyncio.timeout(service.config.body_timeout):
                await request.read()  # kept by aiohttp for the handler
        except TimeoutError:
            raise web.HTTPRequestTimeout(
                text=f"the body did not arrive within {service.config.body_timeout:g} s"
            ) from None
        await service.entrance.begin(request.remote or "")
        return await _received(request, handler)


async def _received(request: web.Request, handler: Handler) -> web.StreamResponse:
    interim = request.version >= HttpVersion11
    request.app[SERVICE].connections.received(request.transport, interim=interim)
    return await handler(request)


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
    allowed = request.app[SERVICE].config.cors_allow_origins
    response.headers.update(cors_headers(request, allowed, EXPOSED_HEADERS))
