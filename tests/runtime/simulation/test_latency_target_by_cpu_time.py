"""--tpot-slo-ms on the embedded model, timed so that a busy machine does not matter.

One compute thread, the synchronous loop, and CPU time in place of wall time: what else runs on the
machine hardly moves it, so the shares below can be asserted anywhere. Targets are taken from what
decode steps and mixed steps cost on the machine at hand: the ratio of the two is its own (bandwidth
bounds a step of few rows on one, arithmetic on another). The scheduler, the model and the kernels
are those that serve.
"""

from __future__ import annotations

import random
import time
from array import array
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

import pytest

from runtime.config import RunnerConfig, SchedulerConfig
from runtime.execution.build import build_runner
from runtime.request import Request, SamplingParams
from runtime.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runtime.execution.model_runner import ModelRunner

pytestmark = pytest.mark.slow
ROWS = 8
PAGE_SIZE = 16
CHUNK_TOKENS = 128  # the CPU's default
LONG_PROMPTS = 2
DECODE_STEPS = 100


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    config = RunnerConfig(device="cpu", cpu_threads=1, max_total_tokens=16_384)
    made, _ = build_runner(config, page_size=PAGE_SIZE, max_running_requests=2 * ROWS)
    yield made
    made.close()


@dataclass
class Step:
    kind: str
    decode_rows: int
    prefill_tokens: int
    seconds: float
    feasible: bool | None


@dataclass
class Service:
    """Eight streams without end, and long prompts where they are asked for."""

    runner: ModelRunner
    target_s: float = 0.0
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                capacity_tokens=self.runner.info.max_total_tokens,
                context_length=8192,
                page_size=PAGE_SIZE,
                max_running_requests=2 * ROWS,
                chunked_prefill_size=CHUNK_TOKENS,
                tpot_slo_ms=1e3 * self.target_s,
            )
        )
        self._draw = random.Random(0)
        self._made = self.streams = 0

    def add(self, prompt_tokens: int, output_tokens: int) -> Request:
        self._made += 1
        ids = array("i", [self._draw.randrange(100, 40_000) for _ in range(prompt_tokens)])
        sampling = SamplingParams(max_new_tokens=output_tokens, temperature=0.0, seed=0)
        sampling = replace(sampling, ignore_eos=True)
        request = Request(f"r{self._made}", ids, sampling, arrival_s=0.0)
        self.scheduler.add(request, time.monotonic())
        return request

    def step(self) -> None:
        """One step, with every stream that has ended begun anew."""
        while self.streams < ROWS:
            self.add(64, self._draw.randint(150, 350))
            self.streams += 1
        batch = self.scheduler.plan(time.monotonic()).batch
        assert batch is not None
        start_s = time.process_time()
        pending = self.runner.launch(batch)
        pending.sample(None)
        output = pending.result()
        output.device_s = time.process_time() - start_s
        for news in self.scheduler.commit(batch, output, time.monotonic()):
            self.streams -= news.finish is not None and len(news.request.input_ids) == 64
        feasible = self.scheduler.slo_feasible
        self.steps.append(
            Step(batch.kind, batch.num_decode, batch.prefill_tokens, output.device_s, feasible)
        )

    def run_until_ended(self, request: Request) -> None:
        while request.finish is None:
            self.step()


@pytest.fixture(scope="module")
def decode_step_s(runner: ModelRunner) -> float:
    service = Service(runner)
    for _ in range(DECODE_STEPS):
        service.step()
    return median(s.seconds for s in service.steps if (s.kind, s.decode_rows) == ("decode", ROWS))


@pytest.fixture(scope="module")
def out_of_reach(runner: ModelRunner, decode_step_s: float) -> tuple[float, list[Step]]:
    """A target that no mixed step can hold, anywhere, since it carries all the decode rows and a
    piece of a prompt; and the mixed steps under it, of one page of prompt each."""
    target_s = 0.9 * decode_step_s
    return target_s, long_prompts_under(runner, target_s)


def long_prompts_under(runner: ModelRunner, target_s: float) -> list[Step]:
    """The mixed steps while long prompts arrive, after some others to learn from."""
    service = Service(runner, target_s)
    for _ in range(20):
        service.step()
    service.run_until_ended(service.add(600, 4))
    first = len(service.steps)
    for _ in range(LONG_PROMPTS):
        service.run_until_ended(service.add(1500, 4))
    return [step for step in service.steps[first:] if step.kind == "mixed"]


def test_less_than_the_decode_step_is_said_to_be_infeasible(
    out_of_reach: tuple[float, list[Step]],
) -> None:
    target_s, steps = out_of_reach
    assert {step.feasible for step in steps} == {False}, describe(steps, target_s)
    assert max(step.prefill_tokens for step in steps) <= PAGE_SIZE


def test_what_the_smallest_steps_hold_with_room_is_held_and_said_to_be(
    runner: ModelRunner, out_of_reach: tuple[float, list[Step]]
) -> None:
    smallest_s = sorted(step.seconds for step in out_of_reach[1])
    target_s = 1.25 * smallest_s[int(0.95 * len(smallest_s))]
    steps = long_prompts_under(runner, target_s)
    assert len(steps) >= LONG_PROMPTS * 1500 / CHUNK_TOKENS
    within = sum(step.seconds <= target_s for step in steps) / len(steps)
    assert within >= 0.95, describe(steps, target_s)
    assert not any(step.feasible is False for step in steps), describe(steps, target_s)
    assert steps[-1].feasible, describe(steps, target_s)


def describe(steps: list[Step], target_s: float) -> str:
    times = sorted(step.seconds for step in steps)
    quantiles = [f"{1e3 * times[int(q * (len(times) - 1))]:.1f}" for q in (0.05, 0.5, 0.95, 1)]
    tokens = median(step.prefill_tokens for step in steps)
    return (
        f"target {1e3 * target_s:.1f} ms; {len(steps)} mixed steps of {tokens} tokens took"
        f" {', '.join(quantiles)} ms (5, 50, 95, 100 %)"
    )
