"""loomserve on Ray Serve: every replica is one engine in a process of its own.

    pip install -e '.[ray]'
    serve run deploy.ray_serve:application model=/models/Qwen3-0.6B max_replicas=4

    clients -> Serve's proxy -> Front (reads the body) -> Serve's prefix-aware router -> Engine

Arguments are options of `loomserve serve` with underscores, `num_cpus` and `num_gpus` of a replica,
and of Serve's autoscaling those in SCALING. Which replica gets a request is decided by Serve's
router alone; how many there are, by what waits and runs in the engines.
"""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from starlette.responses import StreamingResponse

from runtime.errors import ConfigError
from server.app import app_runner, start_listening
from server.args import OPTIONS, make_config
from server.http.sockets import forget_path, listen_on_path
from server.loading import load
from server.service import make_service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from ray.serve.config import AutoscalingContext
    from ray.serve.handle import DeploymentHandle
    from starlette.requests import Request

    from server.config import ServerConfig

# Its public name, in ray.serve.llm, can only be imported where vLLM or SGLang is installed.
PREFIX_AWARE_ROUTER = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router"
    ".PrefixCacheAffinityRouter"
)
# Requests by which a replica may be ahead of another one for the sake of its cache.
MOST_IMBALANCE = 16
# Of the rows of the replicas there are to be, how many may be in use.
GOOD_USE = 0.8
# Requests wait in the engine's own queue, which also refuses those that are too many.
MANY = 100_000
TRIES = 5  # of a request whose replica died before anything came of it
# Headers of one connection, and those that whoever sends a message sets.
OF_REQUESTS = frozenset({"host", "connection", "content-length", "transfer-encoding"})
OF_ANSWERS = frozenset({"date", "server", "connection", "transfer-encoding", "x-request-id"})
SCALING = (
    *("min_replicas", "max_replicas", "upscale_delay_s", "downscale_delay_s"),
    "look_back_period_s",
    "metrics_interval_s",
)
RESOURCES = ("num_cpus", "num_gpus")
# Of a body, what its prompt is made of, in this order.
PROMPT_FIELDS = ("instructions", "system", "messages", "input", "prompt", "text", "input_ids")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request on its way to a replica.

    Args: prompt: what Serve's router compares with what the replicas have had; never empty.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    prompt: str


@dataclass(frozen=True, slots=True)
class Head:
    """How an answer begins."""

    status: int
    headers: dict[str, str]


class Engine:
    """A whole server in this process, reached through a unix socket that only this process uses."""

    async def __init__(self, config: ServerConfig) -> None:
        self._service = make_service(config, load(config))
        self._service.model_format.prepare()
        self._service.engine.start()
        self._runner = app_runner(self._service)
        await self._runner.setup()
        self._socket = os.path.join(tempfile.mkdtemp(prefix="loomserve-"), "engine")
        sockets = listen_on_path(self._socket)
        self._listeners = await start_listening(self._service, self._runner, sockets)
        self._client = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(self._socket, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )

    async def handle(self, asked: Asked) -> AsyncIterator[Head | bytes]:
        """The head of the answer, then its body as it comes. A caller that leaves ends it."""
        async with self._client.request(
            asked.method, "http://engine" + asked.path, headers=asked.headers, data=asked.body
        ) as answer:
            yield Head(answer.status, _without(answer.headers, OF_ANSWERS))
            async for data in answer.content.iter_any():
                yield data

    def check_health(self) -> None:
        """Raises: EngineDead: Serve then starts another replica."""
        if self._service.engine.dead is not None:
            raise self._service.engine.dead

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `by_engine_queue` decides by."""
        now = self._service.engine.load()
        rows = self._service.engine.scheduler.config.max_running_requests
        return {"running": now.running, "waiting": now.waiting, "rows": rows}

    async def __del__(self) -> None:
        """Serve has let what ran here end."""
        await self._client.close()
        for listener in self._listeners:
            listener.close()
        await self._service.engine.stop()
        await self._runner.cleanup()
        self._service.engine.runner.close()
        forget_path(self._socket)
        os.rmdir(os.path.dirname(self._socket))


def by_engine_queue(ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """As many replicas as have rows for what runs and waits; one more than there are where each
    engine has somebody waiting all the same (for KV, say), no fewer where anybody is."""

    def total(name: str) -> float:
        return sum((ctx.aggregated_metrics or {}).get(name, {}).values())

    now, waiting = ctx.current_num_replicas, total("waiting")
    rows = total("rows") / max(len((ctx.aggregated_metrics or {}).get("rows", {})), 1)
    if not rows:
        return ctx.target_num_replicas, {}  # nobody has told anything yet
    wanted = math.ceil((total("running") + waiting) / (GOOD_USE * rows))
    if waiting:
        wanted = max(wanted, now + 1 if waiting >= now else now)
    return wanted, {}


class Front:
    """Takes requests from Serve's proxy and hands them to the engines."""

    def __init__(self, engines: DeploymentHandle) -> None:
        self._engines = engines.options(method_name="handle", stream=True)

    async def __call__(self, request: Request) -> StreamingResponse:
        body = await request.body()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = _without(request.headers, OF_REQUESTS)
        asked = Asked(request.method, path, headers, body, prompt_of(body) or path)
        head, data = await self._begin(asked)
        return StreamingResponse(data, head.status, head.headers)

    async def _begin(self, asked: Asked) -> tuple[Head, AsyncIterator[bytes]]:
        """Raises: RayActorError: one replica after the other died."""
        for left in reversed(range(TRIES)):
            answer = self._engines.remote(asked)
            try:
                return await anext(answer), answer
            except RayActorError:
                if not left:
                    raise
        raise AssertionError


def prompt_of(body: bytes) -> str:
    """The texts of a request's prompt, whatever its protocol; "" where it has none."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ""
    if not isinstance(fields, dict):
        return ""
    return "".join(_text(fields.get(name)) for name in PROMPT_FIELDS)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "".join(map(_text, value))
    if isinstance(value, dict):
        return _text(value.get("content") or value.get("text"))
    if isinstance(value, str):
        return value
    return "" if value is None else f"{value} "  # a token id


def _without(headers: Mapping[str, str], names: frozenset[str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in names}


def application(args: dict[str, str]) -> serve.Application:
    """What `serve run` runs. Raises: ConfigError: an argument that cannot be."""
    scaling = {name: args[name] for name in SCALING if name in args}
    resources = {name: float(args[name]) for name in RESOURCES if name in args}
    options = {name: text for name, text in args.items() if name not in SCALING + RESOURCES}
    if unknown := options.keys() - OPTIONS.keys():
        raise ConfigError(
            f"{min(unknown)}: neither an option of the server nor one of Serve's here"
        )
    # Until the first token nothing goes out, so that Front can ask another replica.
    values = {"sse_keepalive": 0.0} | {name: OPTIONS[name].read(t) for name, t in options.items()}
    config = make_config(values)
    engine = serve.deployment(Engine).options(
        ray_actor_options=resources,
        max_ongoing_requests=MANY,
        graceful_shutdown_timeout_s=config.drain_timeout,
        request_router_config=RequestRouterConfig(
            request_router_class=PREFIX_AWARE_ROUTER,
            request_router_kwargs={"imbalanced_threshold": MOST_IMBALANCE, "do_eviction": True},
        ),
        autoscaling_config=AutoscalingConfig(
            policy=AutoscalingPolicy(policy_function=by_engine_queue), **scaling
        ),
    )
    front = serve.deployment(Front).options(
        max_ongoing_requests=MANY, ray_actor_options={"num_cpus": 0}
    )
    return front.bind(engine.bind(config))
