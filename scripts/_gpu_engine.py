"""The step loop without a server: plans, launches and commits until all requests have ended."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.config import SchedulerConfig
from runtime.request import Request, SamplingParams
from runtime.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.execution.model_runner import ModelRunner
    from runtime.request import TokenLogprobs
    from runtime.runner import LaunchedStep
    from runtime.scheduling.schedule_batch import ScheduleBatch


@dataclass(slots=True)
class Outcome:
    """What a run gave.

    Args:
        tokens, logprobs: by request. prompt_logprobs: by request, where asked for.
        wall_s: of the whole run. device_s: sum over the steps. steps: by kind.
        tail_s, tail_device_s: the same two over the last steps that were decode steps alone.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    wall_s: float = 0.0
    device_s: float = 0.0
    tail_s: float = 0.0
    tail_device_s: float = 0.0


def scheduler_for(runner: ModelRunner, *, chunk: int, mixed: bool) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            capacity_tokens=runner.info.max_total_tokens,
            context_length=runner.sizes.context_length,
            page_size=runner.sizes.page_size,
            max_running_requests=runner.sizes.rows,
            chunked_prefill_size=chunk,
            disable_mixed_chunk=not mixed,
            disable_radix_cache=True,
        )
    )


def make_request(name: str, prompt: Sequence[int], sampling: SamplingParams) -> Request:
    return Request(name, array("i", prompt), sampling, arrival_s=0.0)


class _Run:
    """One run of the loop; at most one step is in flight beside the one being planned."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.outcome = Outcome()
        self._tail_start = 0.0

    def launch(self, batch: ScheduleBatch) -> tuple[ScheduleBatch, LaunchedStep]:
        kind = batch.kind
        self.outcome.steps[kind] = self.outcome.steps.get(kind, 0) + 1
        return batch, self.runner.launch(batch)

    def commit(self, flight: tuple[ScheduleBatch, LaunchedStep]) -> None:
        batch, pending = flight
        output = pending.result()
        now = time.perf_counter()
        outcome = self.outcome
        outcome.device_s += output.device_s
        if batch.kind == "decode":
            # The tail starts at the end of the first decode step behind the last other step.
            if self._tail_start:
                outcome.tail_s = now - self._tail_start
                outcome.tail_device_s += output.device_s
            else:
                self._tail_start = now
        else:
            self._tail_start = outcome.tail_s = outcome.tail_device_s = 0.0
        for news in self.scheduler.commit(batch, output, now):
            name = news.request.request_id
            outcome.tokens.setdefault(name, []).extend(news.token_ids)
            outcome.logprobs.setdefault(name, []).extend(news.logprobs or [])
            if news.prompt_logprobs is not None:
                outcome.prompt_logprobs[name] = news.prompt_logprobs


def run_requests(
    scheduler: Scheduler, runner: ModelRunner, requests: Sequence[Request], *, overlap: bool = True
) -> Outcome:
    """Runs the requests to their ends. overlap: launch step N + 1 before step N is read."""
    run = _Run(scheduler, runner)
    for request in requests:
        scheduler.add(request, 0.0)
    start = time.perf_counter()
    inflight = None
    while scheduler.has_unfinished:
        plan = scheduler.plan(time.perf_counter())
        launched = run.launch(plan.batch) if plan.batch is not None else None
        if inflight is not None:
            run.commit(inflight)
        elif launched is None and scheduler.has_unfinished:
            raise RuntimeError(f"nothing to launch and nothing in flight: {plan.reason}")
        if launched is not None:
            launched[1].sample(None)
            if not overlap:
                run.commit(launched)
                launched = None
        inflight = launched
    run.outcome.wall_s = time.perf_counter() - start
    return run.outcome
