"""The server's side of profile_step.py, in a process of its own.

    python scripts/_profiled_server.py plain|timed|bare

Prints its port, then for every line that it reads a line of JSON: what it has used and done so far.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import statistics
import sys
import time
import types
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.runner import LaunchedStep, StepOutput
from runtime.scheduling.schedule_batch import ScheduleBatch
from runtime.simulation.sim_runner import SimRunner
from server.api.chat import ChatAnswer
from server.api.completions import CompletionAnswer
from server.generation.delivery import Delivery
from server.http.sockets import listen
from server.http.sse import EventStream
from server.launcher import calm_interpreter
from server.service import Service
from tests.fakes import VOCAB_SIZE, fake_server, make_fake_service

PARTS = ("plan", "launch", "commit", "detokenise", "encode", "write")
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
CONTEXT_TOKENS = 1 << 20
POOL_TOKENS = 1 << 28
TOKEN = ord("a")
BARE_EVENT = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'

Tokens = Callable[[], int]


class ZeroRunner(SimRunner):
    """A device that costs nothing: neither checks nor computes, and is done at once."""

    def launch(self, batch: ScheduleBatch) -> LaunchedStep:
        output = StepOutput(token_ids=[TOKEN] * len(batch.sampled))
        return LaunchedStep(lambda step: step.end(output))


class Timers:
    """Processor time of each part, in nanoseconds. Functions are timed by taking their place."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(PARTS, 0)
        self._own = 0
        self._own = self._cost_of_a_timer()

    def start(self, service: Service) -> None:
        for owner, name, part in (
            (service.engine.scheduler, "plan", "plan"),
            (service.engine.runner, "launch", "launch"),
            (service.engine.scheduler, "commit", "commit"),
            (Delivery, "_one", "detokenise"),
            (CompletionAnswer, "events", "encode"),
            (ChatAnswer, "events", "encode"),
            (EventStream, "send", "write"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name), part))

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        clock, spent, own = time.thread_time_ns, self.spent, self._own

        def timed(*args: Any, **options: Any) -> Any:
            begin = clock()
            result = function(*args, **options)
            spent[part] += clock() - begin - own
            return result

        @types.coroutine
        def timed_coroutine(*args: Any) -> Any:
            """Not while it waits."""
            work, given = function(*args), None
            while True:
                begin = clock()
                try:
                    waited_for = work.send(given)
                except StopIteration as end:
                    return end.value
                finally:
                    spent[part] += clock() - begin - own
                given = yield waited_for

        return timed_coroutine if asyncio.iscoroutinefunction(function) else timed

    def _cost_of_a_timer(self) -> int:
        costs = []
        empty = self._timed(lambda: None, "plan")
        for _ in range(2000):
            before = self.spent["plan"]
            empty()
            costs.append(self.spent["plan"] - before)
        self.spent["plan"] = 0
        return int(statistics.median(costs))


class BareServer:
    """What streaming costs by itself: handlers that are woken for each token and write the same
    bytes."""

    def __init__(self) -> None:
        self.tokens = 0
        self._waiting: list[asyncio.Future[None]] = []

    async def stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while True:
                token: asyncio.Future[None] = loop.create_future()
                self._waiting.append(token)
                await token
                await response.write(BARE_EVENT)
        return response

    async def steps(self) -> None:
        while True:
            step, self._waiting = self._waiting, []
            for token in step:
                if not token.done():
                    token.set_result(None)
                    self.tokens += 1
            await asyncio.sleep(0 if step else 0.01)


@contextlib.asynccontextmanager
async def bare() -> AsyncIterator[tuple[int, Tokens]]:
    """The port of a bare server, and how many tokens it has given."""
    server, app = BareServer(), web.Application()
    app.add_routes([web.post(path, server.stream) for path in PATHS.values()])
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    (sock,) = listen("127.0.0.1", 0)
    await web.SockSite(runner, sock).start()
    steps = asyncio.create_task(server.steps())
    yield sock.getsockname()[1], lambda: server.tokens
    steps.cancel()
    await runner.cleanup()


@contextlib.asynccontextmanager
async def loomserve(timers: Timers | None) -> AsyncIterator[tuple[int, Tokens]]:
    """The same of loomserve's."""
    service = make_fake_service(
        ZeroRunner(vocab_size=VOCAB_SIZE, max_total_tokens=POOL_TOKENS),
        scheduler={"max_running_requests": 512, "chunked_prefill_size": 8192},
        context_length=CONTEXT_TOKENS,
    )
    if timers is not None:
        timers.start(service)
    async with fake_server(service) as server:
        port = int(server.url.rpartition(":")[2])
        yield port, lambda: service.engine.scheduler.statistics().counters.output_tokens


async def main(mode: str) -> None:
    timers = Timers()
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    server = bare() if mode == "bare" else loomserve(timers if mode == "timed" else None)
    async with server as (port, tokens):
        print(port, flush=True)
        while await lines.readline():
            used = resource.getrusage(resource.RUSAGE_SELF)
            now = {
                "wall": time.perf_counter(),
                "all": used.ru_utime + used.ru_stime,
                "kernel": used.ru_stime,
                "tokens": tokens(),
                **{part: nanoseconds / 1e9 for part, nanoseconds in timers.spent.items()},
            }
            print(json.dumps(now), flush=True)


if __name__ == "__main__":
    calm_interpreter()
    logging.getLogger("loomserve.loop").setLevel(logging.ERROR)  # it is stopped between windows
    uvloop.run(main(sys.argv[1]))
