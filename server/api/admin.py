"""What operators ask and order: health, metrics, figures, aborting, flushing."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from runtime.errors import EngineDead, InvalidRequest
from runtime.request import SamplingParams
from server.api.answers import new_id
from server.api.fields.bodies import Body, served
from server.api.fields.kinds import Boolean, Text
from server.api.incoming import read_body
from server.args import public_options
from server.generation.exposition import render
from server.generation.params import GenerationParams
from server.http.errors import Draining
from server.service import SERVICE, json_response
from server.version import version

if TYPE_CHECKING:
    from server.service import Service

HEALTH_GENERATE_SECONDS = 20.0


async def health(request: web.Request) -> web.Response:
    """GET /health and /live: whether the engine runs, be it draining. Asks nothing of the queue.

    While the model loads `server.startup` answers instead: /live is fine, /health not yet.
    """
    service = request.app[SERVICE]
    if service.engine.dead is not None:
        raise service.engine.dead
    return json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """GET /ready: whether new requests are taken."""
    if request.app[SERVICE].draining:
        raise Draining
    return await health(request)


async def told_version(request: web.Request) -> web.Response:
    """GET /version."""
    return json_response({"version": version()})


async def health_generate(request: web.Request) -> web.Response:
    """GET /health_generate: whether a token can be generated, within a time limit."""
    service = request.app[SERVICE]
    params = GenerationParams(sampling=SamplingParams(max_new_tokens=1, temperature=0.0))
    start = time.perf_counter()
    # Leaving the block, by the time limit too, takes the probe out of the queue.
    with service.generator.start([[0]], params, new_id("health")) as generation:
        try:
            async with asyncio.timeout(HEALTH_GENERATE_SECONDS):
                async for _ in generation:
                    pass
        except TimeoutError:
            raise EngineDead(f"no token within {HEALTH_GENERATE_SECONDS:g} s") from None
    return json_response({"status": "ok", "seconds": round(time.perf_counter() - start, 4)})


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics, for Prometheus."""
    return web.Response(
        body=render(request.app[SERVICE].metrics),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
    )


class AbortBody(Body):
    """The body of /abort_request."""

    request_id = served(
        Text(),
        "end what has this id: the server's, or one that a client gave",
        names=("rid", "request_id"),
    )
    abort_all = served(Boolean(), "end everything", default=False)

    one_of = ("request_id", "abort_all")


async def abort_request(request: web.Request) -> web.Response:
    """POST /abort_request: {"rid": ID} or {"abort_all": true}. An unknown id is no error."""
    body = await read_body(request, AbortBody)
    generator = request.app[SERVICE].generator
    return json_response({"aborted": generator.abort(body.request_id or None)})


async def flush_cache(request: web.Request) -> web.Response:
    """POST /flush_cache: empties the prefix cache, where nothing runs."""
    flushed = request.app[SERVICE].engine.flush_cache()
    message = "the cache is empty" if flushed else "requests are running: nothing was flushed"
    return json_response({"flushed": flushed, "message": message}, 200 if flushed else 409)


async def server_info(request: web.Request) -> web.Response:
    """GET /server_info, and under SGLang's older name: options (no secrets), sampling defaults,
    runner, scheduler."""
    service = request.app[SERVICE]
    return json_response(
        {
            "version": version(),
            "model": service.limits.model,
            "served_model_name": service.limits.model,
            "model_path": service.source.path,
            "weight_version": service.config.weight_version,
            "options": public_options(service.config),
            "sizes": _sizes(service),
            "sampling_defaults": dataclasses.asdict(service.limits.defaults),
            "runner": service.engine.runner.info.details,
            "max_total_tokens": service.engine.runner.info.max_total_tokens,
            "statistics": dataclasses.asdict(service.engine.scheduler.statistics()),
        }
    )


def _sizes(service: Service) -> dict[str, Any]:
    """What was derived from the options, the model and the device."""
    config = service.engine.scheduler.config
    return {
        "context_length": config.context_length,
        "max_total_tokens": config.capacity_tokens,
        "chunked_prefill_size": config.chunked_prefill_size,
        "step_bound_ms": config.step_bound_ms,
        "served_model_name": list(service.limits.names),
    }


async def debug_requests(request: web.Request) -> web.Response:
    """GET /debug/requests: every live request, and what it has waited for; also what now holds
    the queue back, whether --tpot-slo-ms is within reach, and what clients hold in memory. No
    text."""
    service = request.app[SERVICE]
    scheduler = service.engine.scheduler
    now = scheduler.statistics()
    unsent, unread = service.connections.unsent_bytes, service.generator.unread_tokens
    return json_response(
        {
            "full": now.full,
            "reason": now.reason,
            "chunk_tokens": now.chunk_tokens,
            "slo_feasible": now.slo_feasible,
            "predicted_step_s": now.predicted_step_s,
            "memory": {
                "connections": len(service.connections),
                "connections_bound": service.connections.most,
                "body_bytes": service.bodies.bytes,
                "body_bytes_bound": service.bodies.most,
                "unsent_answer_bytes": sum(unsent),
                "unsent_answer_bytes_of_one": max(unsent, default=0),
                "unread_tokens": sum(unread),
                "unread_tokens_of_one": max(unread, default=0),
            },
            "requests": [dataclasses.asdict(one) for one in scheduler.requests],
        }
    )


async def debug_steps(request: web.Request) -> web.Response:
    """GET /debug/steps?last=N: the newest step records, oldest first."""
    records = request.app[SERVICE].engine.records
    given = request.query.get("last", "100")
    if not given.isdecimal() or len(given) > 6:
        raise InvalidRequest(f"last: got {given[:40]!r}, must be a number", param="last")
    steps = [dataclasses.asdict(record) for record in records.last(int(given))]
    return json_response({"total": records.total, "steps": steps})


ROUTES = [
    web.get("/health", health),
    web.get("/live", health),
    web.get("/ready", ready),
    web.get("/ping", ready),
    web.get("/version", told_version),
    web.get("/health_generate", health_generate),
    web.get("/metrics", metrics),
    web.get("/server_info", server_info),
    web.get("/get_server_info", server_info),
    web.get("/debug/requests", debug_requests),
    web.get("/debug/steps", debug_steps),
    web.post("/abort_request", abort_request),
    web.post("/flush_cache", flush_cache),
]
