"""Drives a scheduler and a runner without a server: the synchronous loop and the overlapped one."""

from __future__ import annotations

import contextlib
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runtime.request import Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runtime.request import Finish, RequestOutput, TokenLogprobs
    from runtime.runner import LaunchedStep, Runner, SampleMasks
    from runtime.scheduling.schedule_batch import ScheduleBatch
    from runtime.scheduling.scheduler import Scheduler

    Masks = Callable[[ScheduleBatch], SampleMasks | None]


@dataclass(slots=True)
class Generated:
    """What came out for one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish: Finish | None = None


@dataclass(slots=True)
class Run:
    """The outcome of a run, and which paths it took.

    Args:
        steps: number of steps by kind ("prefill", "decode", "mixed").
        launched_ahead: steps launched while another was in flight.
    """

    requests: dict[str, Request] = field(default_factory=dict)
    outputs: dict[str, Generated] = field(default_factory=dict)
    steps: Counter[str] = field(default_factory=Counter)
    launched_ahead: int = 0
    failed_steps: int = 0

    @property
    def cached_tokens(self) -> int:
        return sum(request.cached_tokens for request in self.requests.values())

    @property
    def retractions(self) -> int:
        return sum(request.retractions for request in self.requests.values())


def request(name: str, prompt: Sequence[int], sampling: SamplingParams, **more: Any) -> Request:
    return Request(name, array("i", prompt), sampling, arrival_s=0.0, **more)


def run(
    scheduler: Scheduler,
    runner: Runner,
    requests: Sequence[Request],
    *,
    overlap: bool = True,
    masks: Masks = lambda _: None,
    fails: Callable[[ScheduleBatch], bool] = lambda _: False,
    check: bool = True,
) -> Run:
    """Adds the requests and steps until all have ended.

    Args:
        overlap: launch step N + 1 before step N is read.
        masks: asked for each step's masks, once the step before is committed.
        fails: what a step gave is lost, though the device has run it.
        check: recount the scheduler's books after every step.
    """
    result = Run()
    for item in requests:
        scheduler.add(item, 0.0)
        result.requests[item.request_id] = item
        result.outputs[item.request_id] = Generated()
    inflight: tuple[ScheduleBatch, LaunchedStep] | None = None
    now = 0.0
    while scheduler.has_unfinished:
        now += 0.01
        plan = scheduler.plan(now)
        _take(result, plan.ended)
        launched = None
        if plan.batch is not None:
            result.steps[plan.batch.kind] += 1
            result.launched_ahead += inflight is not None
            launched = (plan.batch, runner.launch(plan.batch))
        elif inflight is None and scheduler.has_unfinished:
            raise AssertionError(f"nothing to launch and nothing in flight: {plan.reason}")
        if inflight is not None:
            lost = fails(inflight[0])
            if not _finish(result, scheduler, runner, inflight, launched, now, lost=lost):
                launched = None
        if launched is not None:
            launched[1].sample(masks(launched[0]))
            if not overlap:
                _finish(result, scheduler, runner, launched, None, now)
                launched = None
        inflight = launched
        if check:
            scheduler.check()
    return result


def _finish(
    result: Run,
    scheduler: Scheduler,
    runner: Runner,
    flight: tuple[ScheduleBatch, LaunchedStep],
    later: tuple[ScheduleBatch, LaunchedStep] | None,
    now: float,
    *,
    lost: bool = False,
) -> bool:
    """Commits a step; where it failed, or is to be lost, drops the one launched after it and has
    both taken back."""
    batch, step = flight
    try:
        output = step.result()
        if lost:
            raise RuntimeError("lost")
    except RuntimeError:
        result.failed_steps += 1
        if later is not None:
            later[1].sample(None)
            with contextlib.suppress(RuntimeError):
                later[1].result()
        runner.probe()
        _take(result, scheduler.fail(batch, "the step failed", now))
        return False
    _take(result, scheduler.commit(batch, output, now))
    return True


def _take(result: Run, outputs: Sequence[RequestOutput]) -> None:
    for news in outputs:
        generated = result.outputs[news.request.request_id]
        generated.token_ids.extend(news.token_ids)
        generated.logprobs.extend(news.logprobs or [])
        if news.prompt_logprobs is not None:
            generated.prompt_logprobs = news.prompt_logprobs
        if news.finish is not None:
            generated.finish = news.finish
