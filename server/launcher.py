"""Starts and stops the server: port, model, engine, app, signals, drain."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import shlex
import signal
import ssl
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import uvloop

from runtime.checkpoints.generation_config import read_sampling
from runtime.errors import ConfigError, LoomserveError
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.step_time_model import measure_steps
from runtime.sizing import describe_chunks, size_scheduler
from server.app import app_runner
from server.formats.model_format import ModelFormat
from server.generation.engine import Engine
from server.generation.generator import Generator
from server.generation.metrics import Metrics
from server.generation.params import ApiLimits, SamplingDefaults
from server.http.connections import Connections
from server.http.sockets import BACKLOG, base_url, forget_path, listen, listen_on_path
from server.service import Service
from server.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import socket
    from typing import Any

    from runtime.config import SchedulerConfig
    from runtime.runner import Runner
    from server.config import ServerConfig

log = logging.getLogger("loomserve")

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
# After the drain, what is cut off gets this long to send its last event.
SHUTDOWN_SECONDS = 2.0


def run(config: ServerConfig) -> int:
    """Serves until told to stop. Returns the exit status: 0 after a drain, 2 if it cannot start
    with what it was told."""
    _set_up_logging(config)
    signal.signal(signal.SIGTERM, _leave_while_starting)
    started = time.perf_counter()
    try:
        sockets = listen_on_path(config.uds) if config.uds else listen(config.host, config.port)
        context = _tls_context(config)
        service = make_service(config, _load(config))
        service.model_format.prepare()
    except LoomserveError as error:
        print(f"loomserve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    _progress(f"started in {time.perf_counter() - started:.1f} s")
    # What was loaded stays for good; the collector need not walk it again and again.
    gc.collect()
    gc.freeze()
    try:
        uvloop.run(serve(service, sockets, tls=context))
    finally:
        if config.uds:
            forget_path(config.uds)
    return 0


def _leave_while_starting(number: int, frame: object) -> None:
    raise SystemExit(0)


def _progress(message: str) -> None:
    print(f"loomserve: {message}", file=sys.stderr, flush=True)


def _set_up_logging(config: ServerConfig) -> None:
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    access = logging.getLogger("loomserve.access")
    access.propagate = False
    access.setLevel(logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access.addHandler(handler)


def _tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"ssl_certfile {config.ssl_certfile} with ssl_keyfile {config.ssl_keyfile}: {error}"
        ) from None
    return context


@dataclass(frozen=True, slots=True)
class Parts:
    """What a server is made of below HTTP.

    Args:
        scheduler: made for this runner.
        model_name: the model's own, for a server that is told no other.
        defaults: what requests get that do not say how they are sampled.
    """

    runner: Runner
    scheduler: Scheduler
    tokenizer: Tokenizer
    model_name: str
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)


def _load(config: ServerConfig) -> Parts:
    """Model, tokenizer and scheduler, as the options want them."""
    from runtime.checkpoints.embedded import ensure_embedded_model
    from runtime.checkpoints.model_folder import model_folder

    assert config.runner.cache_dir is not None
    cache_dir = Path(config.runner.cache_dir)
    if config.runner.model is None:
        path, name = ensure_embedded_model(cache_dir, _progress), EMBEDDED_NAME
    else:
        path = Path(config.runner.model).expanduser()
        name = path.resolve().name.removesuffix(".gguf")
    folder = model_folder(path, cache_dir, _progress)
    defaults = sampling_defaults(config.generation_config, folder)
    template = Path(config.chat_template) if config.chat_template is not None else None
    with ThreadPoolExecutor(1) as pool:
        # Importing torch takes longer than the tokenizer, and lets other threads run.
        loading = pool.submit(Tokenizer.load, folder, template)
        from runtime.execution.build import build_runner
        from runtime.execution.warm_up import time_step

        tokenizer = loading.result()
    runner, info = build_runner(
        config.runner,
        page_size=config.scheduler.page_size,
        max_running_requests=config.scheduler.max_running_requests,
        tokenizer_size=tokenizer.vocab_size,
        tokenizer_eos_id=tokenizer.eos_token_id,
        progress=_progress,
    )
    scheduler_config = size_scheduler(
        config.scheduler,
        capacity_tokens=runner.info.max_total_tokens,
        context_length=info.context_length,
        eos_token_ids=info.eos_token_ids,
        device_chunk_tokens=runner.info.chunk_tokens,
        measure=lambda bound_s: measure_steps(
            partial(time_step, runner), bound_s=bound_s, context_length=info.context_length
        ),
    )
    _progress(describe_chunks(scheduler_config))
    return Parts(
        runner,
        _make_scheduler(scheduler_config, config.record),
        tokenizer,
        name,
        defaults,
    )


def sampling_defaults(option: str, folder: Path) -> SamplingDefaults:
    """What requests get that do not say how they are sampled: the settings that the model in
    `folder` brings with it ("auto"), the server's own ("none"), or those of another folder.

    Raises: ModelError: the folder's file is missing or wrong.
    """
    if option == "none":
        return SamplingDefaults()
    if option == "auto":
        return SamplingDefaults(**read_sampling(folder))
    return SamplingDefaults(**read_sampling(Path(option).expanduser(), required=True))


def _make_scheduler(config: SchedulerConfig, trace: str | None) -> Scheduler:
    """A scheduler; one that writes down its inputs and decisions where a trace is wanted."""
    scheduler = Scheduler(config)
    if trace is None:
        return scheduler
    from runtime.simulation.recorder import RecordingScheduler
    from runtime.simulation.trace import TraceWriter

    return cast("Scheduler", RecordingScheduler(scheduler, TraceWriter(Path(trace), config)))


async def serve(
    service: Service, sockets: list[socket.socket], *, tls: ssl.SSLContext | None = None
) -> None:
    """Answers on the sockets until SIGTERM or SIGINT, then drains and closes what it served."""
    service.engine.start()
    runner = app_runner(
        service,
        keepalive_timeout=service.config.idle_timeout,
        shutdown_timeout=SHUTDOWN_SECONDS,
    )
    await runner.setup()
    stop = asyncio.Event()
    _on_signals(stop)
    loop = asyncio.get_running_loop()
    assert runner.server is not None
    factory = service.connections.guard(runner.server)
    # A path is not an address to asyncio.
    create = loop.create_unix_server if service.config.uds else loop.create_server
    servers = [await create(factory, sock=sock, ssl=tls, backlog=BACKLOG) for sock in sockets]
    _announce(base_url(sockets, tls=tls is not None), service)
    await stop.wait()
    await _drain(service)
    for server in servers:
        server.close()
    await service.engine.stop()
    await runner.cleanup()
    service.model_format.close()
    service.tokenizer.close()
    service.engine.runner.close()


def make_service(config: ServerConfig, parts: Parts) -> Service:
    """The parts of a server, put together; its engine is not started yet."""
    runner, scheduler, tokenizer = parts.runner, parts.scheduler, parts.tokenizer
    tokenizer.limit_ids(runner.info.vocab_size)
    model, *aliases = dict.fromkeys(config.served_model_name or (parts.model_name,))
    metrics = Metrics(model, scheduler.statistics, scheduler.waited_seconds)
    engine = Engine(runner, scheduler, tokenizer, metrics, overlap=not config.disable_overlap)
    limits = ApiLimits(
        model=model,
        aliases=tuple(aliases),
        vocab_size=min(runner.info.vocab_size, tokenizer.vocab_size),
        context_length=scheduler.config.context_length,
        max_logprobs=config.max_logprobs,
        max_n=config.max_n,
        defaults=parts.defaults,
    )
    generator = Generator(
        engine,
        tokenizer,
        limits,
        seed=config.runner.seed,
        request_timeout_s=config.request_timeout,
    )
    connections = Connections(
        most=config.max_connections,
        header_timeout_s=config.header_timeout,
        idle_timeout_s=config.idle_timeout,
    )
    metrics.connections = lambda: len(connections)
    return Service(
        config=config,
        engine=engine,
        tokenizer=tokenizer,
        generator=generator,
        metrics=metrics,
        limits=limits,
        model_format=ModelFormat(
            tokenizer,
            runner.info.vocab_size,
            scheduler.config.eos_token_ids,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
        ),
        connections=connections,
        eos_token_ids=scheduler.config.eos_token_ids,
    )


def _on_signals(stop: asyncio.Event) -> None:
    """SIGTERM and the first SIGINT begin the drain; a second SIGINT ends the process at once."""

    def interrupted() -> None:
        if stop.is_set():
            os._exit(130)
        _progress("finishing what runs; press Ctrl-C again to stop at once")
        stop.set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, interrupted)


async def _drain(service: Service) -> None:
    """Takes nothing new and waits for what runs, as long as the option allows."""
    service.draining = True
    end = time.monotonic() + service.config.drain_timeout
    # Polled: every way in which a generation ends would have to notify.
    while service.generator.live and time.monotonic() < end:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    if service.generator.live:
        log.warning("cutting off %d requests after the drain", len(service.generator.live))


def _announce(url: str, service: Service) -> None:
    """The ready line, and a command to try it with."""
    body: dict[str, Any] = {"model": service.limits.model, "stream": True, "temperature": 0}
    if service.tokenizer.chat_template is not None:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "What is the capital of France?"}]
    else:
        path = "/v1/completions"
        body |= {"prompt": "The capital of France is", "max_tokens": 32}
    key = " -H 'Authorization: Bearer YOUR_KEY'" if service.config.api_key else ""
    how = " -k" if url.startswith("https") else ""
    uds = service.config.uds
    if uds is not None:
        how += f" --unix-socket {shlex.quote(uds)}"
    print(f"loomserve is ready on {uds or url} with model {service.limits.model}. Try:\n")
    print(
        f"  curl -N{how} {url}{path}{key} -H 'Content-Type: application/json'"
        f" -d '{json.dumps(body)}'\n",
        flush=True,
    )
