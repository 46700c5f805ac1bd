"""The running server as its handlers share it: one record, reached through the app under a typed
key, and how it is put together.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from runtime.simulation.recorder import RecordingScheduler
from server.formats.model_format import ModelFormat
from server.generation.engine import Engine
from server.generation.generator import Generation, Generator
from server.generation.metrics import Metrics
from server.generation.params import ApiLimits, SamplingDefaults
from server.generation.watchers import Watchers
from server.http.bodies import Bodies
from server.http.connections import Connections
from server.http.entrance import Entrance
from server.observability.live import LiveView
from server.observability.progress import Progress
from server.observability.tracing import Tracing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from runtime.offload.page_store import PageStore
    from runtime.runner import Runner
    from runtime.scheduling.scheduler import Scheduler
    from server.config import ServerConfig
    from server.generation.kv_events import KVEventPublisher
    from server.observability.request_report import RequestReport
    from server.observability.spans import Spans
    from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where the weights came from, for who asks which model this is.

    Args:
        path: as the options name it, else the model's name.
        model_type, architectures: as its config.json names them.
    """

    path: str = ""
    model_type: str = ""
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Parts:
    """What a server is made of below HTTP.

    Args:
        scheduler: made for this runner.
        model_name: the model's own, for a server that is told no other.
        defaults: what requests get that do not say how they are sampled.
        tier: performs the copies and loads that the scheduler names, where it names any.
    """

    runner: Runner
    scheduler: Scheduler
    tokenizer: Tokenizer
    model_name: str
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    source: ModelSource = field(default_factory=ModelSource)
    tier: PageStore | None = None


@dataclass(slots=True)
class Service:
    """The running server as its handlers see it.

    Args:
        reports: told of each request for text when its answer is over.
        eos_token_ids: ids by which the model ends.
        draining: set once; from then on no new request is taken.
    """

    config: ServerConfig
    engine: Engine
    tokenizer: Tokenizer
    generator: Generator
    metrics: Metrics
    limits: ApiLimits
    model_format: ModelFormat
    live: LiveView
    progress: Progress
    reports: Watchers[RequestReport]
    tracing: Tracing
    spans: Spans | None
    connections: Connections
    bodies: Bodies
    entrance: Entrance
    source: ModelSource
    eos_token_ids: frozenset[int]
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False

    def end_traces(self) -> None:
        """Writes and sends what is left of records, traces and spans. Idempotent."""
        if isinstance(self.engine.scheduler, RecordingScheduler):
            self.engine.scheduler.close()
        self.tracing.close()
        if self.spans is not None:
            self.spans.close()


def make_service(
    config: ServerConfig, parts: Parts, *, clock: Callable[[], float] = time.monotonic
) -> Service:
    """The parts of a server, put together; its engine is not started yet.

    Args: clock: see `Engine`.
    """
    runner, scheduler, tokenizer = parts.runner, parts.scheduler, parts.tokenizer
    tokenizer.limit_ids(runner.info.vocab_size)
    if config.allow_special_in_content:
        tokenizer.allow_special_in_content()
    model, *aliases = dict.fromkeys(config.served_model_name or (parts.model_name,))
    metrics = _metrics(config, scheduler, model)
    engine = Engine(
        runner,
        scheduler,
        tokenizer,
        metrics,
        overlap=not config.disable_overlap,
        kv_events=_kv_events(config, scheduler),
        tier=parts.tier,
        clock=clock,
    )
    limits = _limits(config, parts, model, aliases)
    generator = Generator(
        engine, tokenizer, limits, seed=config.runner.seed, request_timeout_s=config.request_timeout
    )
    connections = _connections(config)
    bodies = Bodies(config.max_body_bytes)
    metrics.connections = lambda: len(connections)
    metrics.held_bytes = lambda: (bodies.bytes, sum(connections.unsent_bytes))
    metrics.tasks = _count_tasks
    metrics.unread_tokens = lambda: sum(generator.unread_tokens)
    reports: Watchers[RequestReport] = Watchers()
    tracing = Tracing(generator, reports)
    if config.trace is not None:
        tracing.write_to(config.trace)
    spans = _spans(config, model, engine)
    if spans is not None:
        reports.watch(spans.send)
    return Service(
        config=config,
        engine=engine,
        tokenizer=tokenizer,
        generator=generator,
        metrics=metrics,
        limits=limits,
        model_format=_model_format(config, parts),
        live=LiveView(engine),
        progress=Progress(engine),
        reports=reports,
        tracing=tracing,
        spans=spans,
        connections=connections,
        bodies=bodies,
        entrance=Entrance(),
        source=parts.source,
        eos_token_ids=scheduler.config.eos_token_ids,
    )


def _count_tasks() -> int:
    """Those of the event loop that runs; none where the metrics are read beside it."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0


def _spans(config: ServerConfig, model: str, engine: Engine) -> Spans | None:
    if config.otlp_endpoint is None:
        return None
    from server.observability.spans import Spans

    return Spans(config.otlp_endpoint, model, engine.clock)


def _metrics(config: ServerConfig, scheduler: Scheduler, model: str) -> Metrics:
    return Metrics(
        model,
        scheduler.statistics,
        scheduler.waited_seconds,
        _cache_info(scheduler),
        config.metrics_compat,
    )


def _limits(config: ServerConfig, parts: Parts, model: str, aliases: Sequence[str]) -> ApiLimits:
    return ApiLimits(
        model=model,
        aliases=tuple(aliases),
        vocab_size=min(parts.runner.info.vocab_size, parts.tokenizer.vocab_size),
        context_length=parts.scheduler.config.context_length,
        max_logprobs=config.max_logprobs,
        max_n=config.max_n,
        defaults=parts.defaults,
    )


def _connections(config: ServerConfig) -> Connections:
    return Connections(
        most=config.max_connections,
        header_timeout_s=config.header_timeout,
        idle_timeout_s=config.idle_timeout,
        unread_timeout_s=config.slow_reader_timeout,
    )


def _model_format(config: ServerConfig, parts: Parts) -> ModelFormat:
    return ModelFormat(
        parts.tokenizer,
        parts.runner.info.vocab_size,
        parts.scheduler.config.eos_token_ids,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        volatile_lines=config.volatile_line,
    )


def _kv_events(config: ServerConfig, scheduler: Scheduler) -> KVEventPublisher | None:
    if config.kv_events is None:
        return None
    from server.generation.kv_events import KVEventPublisher

    watched = scheduler.watch_cache()
    return KVEventPublisher(
        watched, config.kv_events, config.kv_events_replay, config.kv_events_topic
    )


def _cache_info(scheduler: Scheduler) -> dict[str, str]:
    """The KV pool under vLLM's names, for schedulers that count a prompt's blocks themselves."""
    config = scheduler.config
    return {
        "block_size": str(config.page_size),
        "num_gpu_blocks": str(config.capacity_tokens // config.page_size),
        "enable_prefix_caching": str(not config.disable_radix_cache),
    }


SERVICE = web.AppKey("service", Service)
REQUEST_ID = web.RequestKey("request_id", str)  # the client's, or the server's
RECEIVED = web.RequestKey("received", float)  # when it was, on the engine's clock
GENERATION = web.RequestKey("generation", Generation)  # what it has set off, if anything

PIECE = 1 << 20  # bytes of an answer that are written at once


def json_response(data: Any, status: int = 200) -> web.Response:
    return json_bytes(orjson.dumps(data), status)


def json_bytes(body: bytes, status: int = 200) -> web.Response:
    """An answer that is JSON already. A large one goes out in pieces, between which others run."""
    return web.Response(
        body=body if len(body) <= PIECE else _pieces(body),
        headers={"Content-Length": str(len(body))},
        status=status,
        content_type="application/json",
        charset="utf-8",
    )


async def _pieces(body: bytes) -> AsyncIterator[memoryview]:
    for start in range(0, len(body), PIECE):
        yield memoryview(body)[start : start + PIECE]
        await asyncio.sleep(0)
