"""The step loop without a server: plans, launches and commits until all requests have ended."""

from __future__ import annotations

import time
from array import array
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from runtime.config import SchedulerConfig
from runtime.execution.unplanned_step import unplanned_step
from runtime.request import Request, SamplingParams
from runtime.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from runtime.execution.device import Device
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
        tail_s, tail_device_s: the same two over the last steps that were decode steps alone, and
            tail_steps their number.
        host_s: what launching and sampling took of the host, over all steps.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    wall_s: float = 0.0
    device_s: float = 0.0
    tail_s: float = 0.0
    tail_device_s: float = 0.0
    tail_steps: int = 0
    host_s: float = 0.0


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


@contextmanager
def forbidding_waits(device: Device) -> Iterator[None]:
    """In the block torch raises where a call waits for the device by itself: a copy from pageable
    memory, a value that is read."""
    if not device.queued:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def mixed_batch(chunk: int, rows: int, kv_len: int) -> ScheduleBatch:
    """A step whose first row is a prompt of `chunk` tokens, in the pages that `fill_decode_rows`
    gave to the row behind the decode rows."""
    tokens = array("i", [1] * chunk)
    sampling = SamplingParams(temperature=0.0)
    requests = [make_request(f"r{i}", tokens, sampling) for i in range(rows + 1)]
    in_table = [rows + 1, *range(1, rows + 1)]
    return unplanned_step(requests, in_table, [0] + [kv_len - 1] * rows, tokens)


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
        start = time.perf_counter()
        with forbidding_waits(self.runner.device):
            launched = self.runner.launch(batch)
        self.outcome.host_s += time.perf_counter() - start
        return batch, launched

    def sample(self, launched: LaunchedStep) -> None:
        start = time.perf_counter()
        with forbidding_waits(self.runner.device):
            launched.sample(None)
        self.outcome.host_s += time.perf_counter() - start

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
                outcome.tail_steps += 1
            else:
                self._tail_start = now
        else:
            self._tail_start = outcome.tail_s = outcome.tail_device_s = 0.0
            outcome.tail_steps = 0
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
            run.sample(launched[1])
            if not overlap:
                run.commit(launched)
                launched = None
        inflight = launched
    run.outcome.wall_s = time.perf_counter() - start
    return run.outcome
