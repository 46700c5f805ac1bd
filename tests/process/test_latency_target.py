"""--tpot-slo-ms on the embedded model: held where it can be, and said where it cannot.

The targets come from what steps take on this machine, measured on the same server: what a mixed step
costs beside a decode step is each machine's own. Device times of the step records are judged, since
clients share the cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.process.server_process import PATIENCE_S, ServerProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = pytest.mark.slow
ROWS = 8
LONG_PROMPTS = 4
CHUNK_TOKENS = 24
ATTEMPTS = 3  # a hiccup of the machine passes; a mechanism that is broken fails every time
_draw = random.Random(0)


@dataclass
class Load:
    """Streams against one server, and the records of the steps that ran."""

    url: str
    client: aiohttp.ClientSession
    steps: list[dict[str, Any]] = field(default_factory=list)
    infeasible_seen: int = 0
    looks: int = 0
    collected: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def complete(self, prompt_tokens: int, output_tokens: int) -> None:
        body = {
            "prompt": [_draw.randrange(100, 40_000) for _ in range(prompt_tokens)],
            "max_tokens": output_tokens,
            "ignore_eos": True,
        }
        async with self.client.post(f"{self.url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()

    async def stream_for_ever(self) -> None:
        while True:
            await self.complete(64, 250)

    async def get(self, path: str) -> Any:
        async with self.client.get(self.url + path) as answer:
            return await (answer.json() if path != "/metrics" else answer.text())

    async def collect(self) -> None:
        """Reads the new step records."""
        newest = self.steps[-1]["step"] if self.steps else -1
        found = (await self.get("/debug/steps?last=400"))["steps"]
        assert not self.steps or found[0]["step"] <= newest + 1, "records were lost"
        self.steps += [step for step in found if step["step"] > newest]
        async with self.collected:
            self.collected.notify_all()

    async def watch(self) -> None:
        """Looks at the server twice a second, and at its steps every other second: looking takes
        time from the cores that the model runs on."""
        while True:
            state = await self.get("/debug/requests")
            self.looks += 1
            self.infeasible_seen += state["slo_feasible"] is False
            if self.looks % 4 == 0:
                await self.collect()
            await asyncio.sleep(0.5)


@contextlib.asynccontextmanager
async def serving(*options: str) -> AsyncIterator[tuple[Load, ServerProcess]]:
    with ServerProcess("--port", "0", "--max-running-requests", "16", *options) as server:
        url = await asyncio.to_thread(server.url)
        async with aiohttp.ClientSession() as client:
            yield Load(url, client), server


@contextlib.asynccontextmanager
async def eight_streams(load: Load) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(load.stream_for_ever()) for _ in range(ROWS)]
    tasks.append(asyncio.create_task(load.watch()))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


@dataclass
class StepCosts:
    """Seconds of steps beside eight streams.

    Args:
        decode: a decode step, the median of some hundred of them.
        mixed: what 95 % of the mixed steps with `CHUNK_TOKENS` stay within.
    """

    decode: float
    mixed: float


async def step_costs() -> StepCosts:
    size = str(CHUNK_TOKENS + ROWS)  # the decode rows' tokens come out of it
    async with serving("--chunked-prefill-size", size) as (load, _), eight_streams(load):
        await load.complete(600, 4)  # by then all streams run
        await load.complete(1500, 4)
        await load.collect()
        async with asyncio.timeout(PATIENCE_S), load.collected:
            await load.collected.wait_for(lambda: len(times_of(load.steps, "decode")) >= 200)
    mixed = sorted(times_of(load.steps, "mixed"))
    return StepCosts(median(times_of(load.steps, "decode")), mixed[int(0.95 * len(mixed))])


def times_of(steps: list[dict[str, Any]], kind: str) -> list[float]:
    return [s["device_s"] for s in steps if s["kind"] == kind and s["decode_rows"] == ROWS]


@dataclass
class Outcome:
    within: float
    mixed_steps: int
    infeasible_share: float
    metrics: str
    log: str


async def long_prompts_under(target_s: float) -> Outcome:
    """Share of the mixed steps within the target while long prompts arrive beside the streams."""
    async with serving("--tpot-slo-ms", f"{1e3 * target_s:.3f}") as (load, server):
        async with eight_streams(load):
            await load.complete(600, 4)  # steps to learn from, as any server has seen
            await load.collect()
            first, load.looks, load.infeasible_seen = load.steps[-1]["step"] + 1, 0, 0
            for _ in range(LONG_PROMPTS):
                await load.complete(1500, 4)
            await load.collect()
            metrics = await load.get("/metrics")
            last = load.steps[-1]["step"]
            looks, infeasible = load.looks, load.infeasible_seen
        log = server.output
    times = [
        step["device_s"]
        for step in load.steps
        if step["kind"] == "mixed" and first <= step["step"] <= last
    ]
    within = sum(time <= target_s for time in times) / len(times)
    return Outcome(within, len(times), infeasible / max(looks, 1), metrics, log)


_SPIN = """
import time
start, cpu = time.perf_counter(), time.process_time()
while time.perf_counter() - start < 0.5:
    pass
print((time.process_time() - cpu) / (time.perf_counter() - start))
"""


def cores_are_free() -> bool:
    """Whether two busy processes get two cores: with other work beside it, the same step takes two
    to eight times as long from one moment to the next, and no chunk size can hold a target."""
    command = [sys.executable, "-c", _SPIN]
    spinning = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    return min(float(process.communicate()[0]) for process in spinning) > 0.9


async def judge(target: Callable[[StepCosts], float], passes: Callable[[Outcome], bool]) -> Outcome:
    """An outcome that passes, of a few attempts; skips where the machine was never free for one."""
    judged = []
    for _ in range(ATTEMPTS):
        if not cores_are_free():
            continue
        outcome = await long_prompts_under(target(await step_costs()))
        if passes(outcome):
            return outcome
        if cores_are_free():
            judged.append((round(outcome.within, 3), round(outcome.infeasible_share, 3)))
    if len(judged) == ATTEMPTS:
        pytest.fail(f"(share within the target, share of looks that said infeasible): {judged}")
    pytest.skip("other work runs on this machine: step times mean nothing")


async def test_target_with_room_is_held_while_long_prompts_arrive() -> None:
    # By CPU time a tight target is held in tests/runtime/simulation; by the clock a machine's own
    # jitter decides. This one has room.
    outcome = await judge(
        lambda costs: 1.6 * costs.mixed, lambda o: o.within >= 0.95 and o.infeasible_share == 0.0
    )
    assert outcome.mixed_steps >= LONG_PROMPTS * 1500 / 128
    assert slo_metric(outcome.metrics) == 1.0
    # While the first steps are learned from, a hiccup may be taken for the rule, and taken back.
    assert outcome.log.count("is not feasible") == outcome.log.count("feasible again")


async def test_target_that_cannot_be_held_is_reported_everywhere() -> None:
    # A mixed step carries all the decode rows, so none takes less than they do.
    outcome = await judge(lambda costs: 0.9 * costs.decode, lambda o: o.infeasible_share >= 0.5)
    assert slo_metric(outcome.metrics) == 0.0
    assert "is not feasible" in outcome.log


def slo_metric(metrics: str) -> float:
    lines = [line for line in metrics.splitlines() if line.startswith("loomserve:slo_feasible")]
    return float(lines[0].split()[-1])
