"""Sends one load to one server and keeps what came back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from server.bench.answer import Answer
from server.bench.client import fill, first_model, open_session
from server.bench.figures import summarize
from server.bench.own_load import OwnLoad
from server.bench.server_watch import Sample, watch_server

if TYPE_CHECKING:
    import aiohttp

    from server.bench.arrivals import Arrivals
    from server.bench.slo import Slo
    from server.bench.target import Target
    from server.bench.turns import Conversation
    from server.bench.workloads import Workload

SAMPLE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent, and when.

    Args:
        arrivals: when conversations begin; None: at the times of their file, if it has some, or
            `concurrency` at a time.
        concurrency: clients that each begin a conversation when their last has ended; 0: the times
            of the file hold.
        max_seconds: what still runs then is cut off.
    """

    workload: Workload
    arrivals: Arrivals | None = None
    concurrency: int = 8
    max_seconds: float = 600.0
    seed: int = 1

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        workload, arrivals = self.workload, self.arrivals
        return {
            "workload": workload.kind,
            "requests": workload.requests,
            "prompt_tokens": workload.prompt.text,
            "output_tokens": workload.output.text,
            "file": None if workload.file is None else workload.file.name,
            "arrivals": "closed loop" if arrivals is None and self.concurrency else self._timing(),
            "concurrency": self.concurrency or None,
            "rate": None if arrivals is None else arrivals.rate,
            "ramp_to": None if arrivals is None else arrivals.ramp_to,
            "max_seconds": self.max_seconds,
            "seed": self.seed,
        }

    def _timing(self) -> str:
        return "the file's" if self.arrivals is None else self.arrivals.kind


@dataclass(slots=True)
class Run:
    """A load that was sent.

    Args:
        origin: when it began, on the clock that all times are of.
        samples: of the server, while it ran.
    """

    target: Target
    load: Load
    origin: float
    wall_s: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    client: dict[str, Any] = field(default_factory=dict)

    def summary(self, slo: Slo | None = None) -> dict[str, Any]:
        """`summarize`'s record with the server and the load beside the figures."""
        return {
            "base_url": self.target.base_url,
            "model": self.target.model,
            "endpoint": self.target.endpoint,
            "load": self.load.describe(),
            "client": self.client,
            **summarize(self.answers, self.wall_s, slo),
        }


async def run_load(
    target: Target, load: Load, on_answer: Callable[[Answer], None] = lambda _: None
) -> Run:
    """Sends the load, and waits for the answers until the time is up.

    Raises: aiohttp.ClientError: no server answers. ConfigError: the workload's file is wrong.
    """
    async with open_session(target) as session:
        if not target.model:
            target = replace(target, model=await first_model(session, target))
        conversations = load.workload.conversations(load.seed)
        own, run = OwnLoad(), Run(target, load, time.perf_counter())

        def talk(conversation: Conversation, due: float | None) -> Work:
            return _talk(session, run, conversation, due, on_answer)

        beside = [
            asyncio.create_task(own.watch()),
            asyncio.create_task(watch_server(session, target, run.samples, SAMPLE_SECONDS)),
        ]
        try:
            async with asyncio.timeout(load.max_seconds):
                await _send(load, conversations, run.origin, talk)
        except TimeoutError:
            pass  # what was cut says so itself
        finally:
            run.wall_s = time.perf_counter() - run.origin
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
        run.answers.sort(key=lambda answer: answer.start)
        run.client = own.summary()
    return run


Work = Coroutine[Any, Any, None]


async def _send(
    load: Load,
    conversations: list[Conversation],
    origin: float,
    talk: Callable[[Conversation, float | None], Work],
) -> None:
    """Begins every conversation in its time; returns when all have ended."""
    if load.arrivals is None and load.concurrency:
        remaining = iter(conversations)

        async def worker() -> None:
            for conversation in remaining:
                await talk(conversation, None)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(load.concurrency, len(conversations))):
                group.create_task(worker())
        return
    if load.arrivals is None:
        times: Iterable[float] = [conversation.start_s or 0.0 for conversation in conversations]
    else:
        times = load.arrivals.times(len(conversations), load.seed)
    async with asyncio.TaskGroup() as group:
        for conversation, at in zip(conversations, times, strict=False):
            due = origin + at
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(talk(conversation, due))


async def _talk(
    session: aiohttp.ClientSession,
    run: Run,
    conversation: Conversation,
    due: float | None,
    on_answer: Callable[[Answer], None],
) -> None:
    """Asks turn by turn, each on top of all before it; ends where one fails."""
    said: list[tuple[str, str]] = []
    for number, turn in enumerate(conversation.turns):
        said.append(("user", turn.text))
        answer = Answer(turn.max_tokens, f"turn {number + 1}", due if number == 0 else None)
        run.answers.append(answer)
        await fill(session, run.target, said, answer)
        on_answer(answer)
        if not answer.ok:
            return
        said.append(("assistant", answer.text))


async def closed_loop(
    calls: Iterable[Callable[[], Awaitable[Answer]]], concurrency: int
) -> list[Answer]:
    """Runs the calls in order, `concurrency` at a time; answers in the order of their start."""
    remaining = iter(calls)

    async def worker() -> list[Answer]:
        return [await call() for call in remaining]

    shares = await asyncio.gather(*(worker() for _ in range(concurrency)))
    return sorted((answer for share in shares for answer in share), key=lambda a: a.start)
