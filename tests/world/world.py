"""One seed: a server with drawn settings, its clients, what goes wrong, and whether all was right.

    report = run(7)
    assert not report.problems

Everything that is drawn comes from the seed, so the same commit gives the same run: `report.trace`
is a hash of every byte, every moment at which it arrived, and every step of the scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import random
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from aiohttp import web_app

from runtime.config import RunnerConfig, SchedulerConfig
from runtime.errors import InvariantError
from runtime.scheduling.policies import POLICIES
from server.config import ServerConfig
from server.generation.step_records import StepRecord
from server.loading import make_scheduler
from server.service import Parts, Service, make_service
from server.serving import serve
from tests.fakes import IM_END
from tests.world.clients import Client
from tests.world.device import WorldRunner
from tests.world.faults import Faults, shared_tokenizer, world_around, world_tokenizer
from tests.world.judge import Excuses, judge
from tests.world.loop import LAST_SECOND, Hang, WorldLoop
from tests.world.network import ListeningSocket, Network
from tests.world.traffic import CONTEXT, MODEL, Author

LOGGERS = ("loomserve", "asyncio", "aiohttp")


@dataclass
class Report:
    """What a seed did. faults: by kind; trace: a hash of the whole run."""

    seed: int
    problems: list[str] = field(default_factory=list)
    requests: int = 0
    steps: int = 0
    virtual_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    trace: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


def settle() -> None:
    """Once in a process, so that the garbage collected before each world is that of worlds alone."""
    gc.collect()
    gc.freeze()


def run(seed: int) -> Report:
    """Runs a seed."""
    return World(seed).run()


class World:
    def __init__(self, seed: int) -> None:
        self.report = Report(seed)
        self._seed = seed
        self._hash = hashlib.blake2b(digest_size=12)
        self._loop = WorldLoop(self._random("threads"))
        self._faults = Faults(self._random("faults"))
        self._excuses = Excuses()
        self._logged: list[str] = []

    def _random(self, role: str) -> random.Random:
        return random.Random(f"{self._seed}/{role}")

    def run(self) -> Report:
        shared_tokenizer()
        # It holds a hundred worlds that are over, all of which the collector would look through.
        web_app._cached_build_middleware.cache_clear()
        gc.collect()
        gc.disable()  # what is collected must not depend on what ran before
        try:
            with (
                _captured(self._logged),
                world_around(self._loop, self._faults, self._random("server")),
            ):
                self._loop.run(self._main())
        except Hang as error:
            self.report.problems.append(f"hangs: {error}")
        finally:
            gc.enable()
        report = self.report
        report.problems += [f"unhandled: {one}" for one in self._loop.broken]
        report.problems += [f"logged: {one}" for one in self._logged if not self._expected(one)]
        report.virtual_s = self._loop.time()
        report.faults = self._faults.counts
        report.trace = self._hash.hexdigest()
        return report

    def _tell(self, connection: int, direction: str, data: bytes) -> None:
        self._hash.update(f"{self._loop.time():.6f} {connection} {direction} ".encode() + data)

    def _tell_step(self, record: StepRecord) -> None:
        self._hash.update(f"{record.step} {record.prefill_ids} {record.decode_ids}".encode())

    def _expected(self, line: str) -> bool:
        """Errors are logged where something went wrong that is not the client's to see."""
        counts = self._faults.counts
        if line.startswith(("asyncio", "aiohttp")):
            return False
        return any(counts[kind] for kind in _LOGGED)

    def _service(self) -> Service:
        rng = self._random("settings")
        scheduler, server = _settings(rng)
        config = SchedulerConfig(
            context_length=CONTEXT, eos_token_ids=frozenset({IM_END}), **scheduler
        )
        self.report.settings = {**scheduler, **server}
        runner = WorldRunner(
            self._loop,
            self._faults,
            pages=config.capacity_tokens // config.page_size,
            page_size=config.page_size,
        )
        self._excuses.queue_bound = config.max_queued_requests > 0
        self._excuses.time_bound = bool(
            config.waiting_timeout_s or config.running_timeout_s or server.get("request_timeout")
        )
        record = "trace" if rng.random() < 0.3 else None
        parts = Parts(runner, make_scheduler(config, record), world_tokenizer(self._faults), MODEL)
        server_config = ServerConfig(runner=RunnerConfig(), port=0, **server)
        service = make_service(server_config, parts, clock=self._loop.time)
        service.engine.watch_steps(self._tell_step)
        self._author = Author(
            self._random("requests"),
            min(config.usable_tokens, CONTEXT),
            timeouts=rng.random() < 0.2,
        )
        return service

    async def _main(self) -> None:
        self._network = Network(self._loop, self._random("network"), self._tell)
        self._loop.network = self._network
        service = self._service()
        serving = asyncio.create_task(
            serve(
                service,
                [ListeningSocket()],  # type: ignore[list-item]
                signals=SimpleNamespace(received=False),  # type: ignore[arg-type]
            )
        )
        await asyncio.sleep(0.01)
        rng = self._random("clients")
        clients = self._clients(rng)
        clock = asyncio.create_task(self._bend_time(rng))
        running = [asyncio.create_task(self._arrive(one, rng.uniform(0, 1.5))) for one in clients]
        early = self._loop.call_later(
            rng.uniform(0.05, 2.0) if rng.random() < 0.25 else LAST_SECOND, self._terminate
        )
        await asyncio.gather(*(one.over.wait() for one in clients))
        if rng.random() < 0.1:
            await self._outlast(clients)
        early.cancel()
        self._terminate()
        async with asyncio.timeout(1000):
            await serving
        clock.cancel()
        await asyncio.gather(clock, *running, return_exceptions=True)
        await asyncio.sleep(0.1)  # what is on the way between two ends arrives
        for one in clients:
            self._note_aborts(one)
        self._check(service, clients)

    def _clients(self, rng: random.Random) -> list[Client]:
        clients = []
        for _ in range(rng.randint(6, 18)):
            asked = [self._author.write() for _ in range(rng.choice((1, 1, 2, 3, 5)))]
            clients.append(Client(self._network, rng, asked, self._faults.counts))
        return clients

    async def _arrive(self, client: Client, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await client.run()

    async def _bend_time(self, rng: random.Random) -> None:
        """The process is held up, and the wall clock is set."""
        while True:
            await asyncio.sleep(rng.expovariate(1.0))
            draw = rng.random()
            if draw < 0.3:
                self._faults.counts["held up"] += 1
                self._loop.stall(rng.choice((0.03, 0.3, 3.0)))
            elif draw < 0.5:
                self._faults.counts["clock set"] += 1
                self._faults.wall_s += rng.choice((-7200.0, 1e6, -1.5))

    def _terminate(self) -> None:
        if self._excuses.drained_s > self._loop.time():
            self._excuses.drained_s = self._loop.time()
            self._loop.signals[signal.SIGTERM]()

    async def _outlast(self, clients: list[Client]) -> None:
        """Waits until nothing is left that a time limit should have ended."""
        await asyncio.sleep(30.0)
        if self._excuses.drained_s > self._loop.time():
            self.report.problems += [
                f"connection {one.number} is kept for nobody"
                for one in self._network.connections
                if not one.lost
            ]

    def _note_aborts(self, client: Client) -> None:
        for call in client.calls:
            if call.asked.path == "/abort_request" and call.sent_s >= 0:
                name = call.asked.body.get("rid")
                self._excuses.aborts.append((call.sent_s, call.ended_s, name))

    def _check(self, service: Service, clients: list[Client]) -> None:
        report = self.report
        self._excuses.struck = self._faults.struck
        if service.engine.dead is not None:
            self._excuses.dead_s = self._faults.dead_s
            if not self._faults.counts["probe"]:
                report.problems.append(f"the engine died: {service.engine.dead}")
        for number, client in enumerate(clients):
            report.problems += [f"client {number}: {one}" for one in judge(client, self._excuses)]
            for call in client.calls:
                status = call.answer.status if call.answer.complete else 0
                report.statuses[str(status or ("left" if call.left else "cut"))] += 1
        report.requests = sum(len(client.calls) for client in clients)
        report.steps = service.engine.runner.steps  # type: ignore[attr-defined]
        self._check_books(service)
        self._check_leavings(service)

    def _check_books(self, service: Service) -> None:
        scheduler = service.engine.scheduler
        problems = self.report.problems
        if service.engine.dead is not None:
            return  # nobody goes on with these books
        try:
            scheduler.check()
        except InvariantError as error:
            problems.append(f"books: {error}")
        found = scheduler.statistics()
        facts = {
            "unfinished": int(scheduler.has_unfinished),
            "private": found.private_tokens,
            "protected": found.protected_tokens,
            "rows": scheduler.config.max_running_requests - found.free_rows,
            "lost": found.capacity_tokens
            - found.free_tokens
            - found.cached_tokens
            - found.reserved_tokens,
        }
        problems += [f"books: {name} {count}" for name, count in facts.items() if count]

    def _check_leavings(self, service: Service) -> None:
        problems = self.report.problems
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        problems += [f"a task is left: {task!r}" for task in tasks]
        problems += [f"a timer is left: {timer}" for timer in self._loop.timers]
        if service.engine.delivery.live:
            problems.append(f"{len(service.engine.delivery.live)} choices are left")
        if service.engine.delivery.masked:
            problems.append(f"{service.engine.delivery.masked} choices with masks are counted")
        if service.generator.live:
            problems.append(f"{len(service.generator.live)} generations are left")
        if len(service.connections):
            problems.append(f"{len(service.connections)} connections are left")
        compiler = service.model_format._compiler
        if compiler._going_on:
            problems.append("a compilation is left")
        for connection in self._network.connections:
            if connection.lost != 1:
                problems.append(f"connection {connection.number} was ended {connection.lost} times")
        disk = self._faults.disk
        if disk.opened != disk.closed:
            problems.append(f"{disk.opened - disk.closed} files are left open")
        if not service.engine.runner.closed:  # type: ignore[attr-defined]
            problems.append("the runner is not closed")


_LOGGED = (
    "launch",
    "step",
    "late step",
    "probe",
    "detokenizer",
    "grammar compiler",
    "grammar mask",
    "grammar token",
    "failing row",
    "disk full",
    "disk torn",
)


def _settings(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of the scheduler's and the server's options."""
    page = rng.choice((1, 4, 16))
    scheduler: dict[str, Any] = {
        "page_size": page,
        "capacity_tokens": page * (rng.choice((300, 600, 1200, 4000)) // page + 1),
        "max_running_requests": rng.choice((1, 2, 4, 8, 16)),
        "chunked_prefill_size": rng.choice((-1, 2 * page, 64, 64, 256)),
        "schedule_policy": rng.choice(tuple(POLICIES)),
        "eviction_policy": rng.choice(("lru", "lfu", "fifo")),
        "prefill_share": rng.choice((0.0, 0.25, 0.6)),
        "disable_mixed_chunk": rng.random() < 0.3,
        "disable_radix_cache": rng.random() < 0.25,
        "schedule_conservativeness": rng.choice((0.0, 0.3, 1.0)),
        "priority_preemption_threshold": rng.choice((0, 3, 10)),
        "max_queued_requests": rng.choice((0, 0, 3, 10)),
        "enable_prefill_delayer": rng.random() < 0.2,
        "policy_seed": rng.randrange(100),
    }
    if rng.random() < 0.15:
        scheduler["waiting_timeout_s"] = 0.5
    if rng.random() < 0.1:
        scheduler["running_timeout_s"] = 0.3
    if rng.random() < 0.2 and scheduler["chunked_prefill_size"] > 0:
        scheduler["enable_dynamic_chunking"] = True
    elif rng.random() < 0.15:
        scheduler["tpot_slo_ms"] = 5.0
    server: dict[str, Any] = {
        "disable_overlap": rng.random() < 0.4,
        "max_body_bytes": 65536,
        "header_timeout": 3.0,
        "idle_timeout": 4.0,
        "body_timeout": 3.0,
        "slow_reader_timeout": 2.0,
        "drain_timeout": rng.choice((0.0, 0.2, 5.0)),
        "sse_keepalive": rng.choice((0.0, 0.02, 5.0)),
    }
    if rng.random() < 0.1:
        server["request_timeout"] = 1.0
    return scheduler, server


@contextlib.contextmanager
def _captured(lines: list[str]) -> Iterator[None]:
    """Errors that are logged, as lines; all else is dropped unformatted."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = record.exc_info[1] if record.exc_info else None
            lines.append(f"{record.name}: {record.getMessage()} {error!r}")

    handler = Lines(logging.ERROR)
    before = []
    for name in LOGGERS:
        logger = logging.getLogger(name)
        before.append((logger, logger.level, logger.propagate))
        logger.addHandler(handler)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, level, propagate in before:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
