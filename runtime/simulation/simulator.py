"""Drives a scheduler under a virtual clock: what the engine's step loop does, without a device.

The loop keeps the engine's overlap: plan N + 1 while N runs, launch it behind N, then commit N. A
step takes what a `StepTimer` says; the host's own work takes `HostCost` and is hidden behind the
device exactly as far as the overlap hides it.
"""

from __future__ import annotations

import heapq
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from runtime.errors import LoomserveError
from runtime.request import Finish, FinishReason, Request, RequestOutput, SamplingParams
from runtime.runner import StepOutput
from runtime.scheduling.kv_tier import PageLoad
from runtime.simulation.cost_model import StepTimer, StepWork
from runtime.simulation.tier import SimulatedTier, TierTimes
from runtime.simulation.virtual_clock import VirtualClock
from runtime.simulation.workloads import EOS_TOKEN_ID, Arrival

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from runtime.scheduling.plan import Plan
    from runtime.scheduling.schedule_batch import ScheduleBatch
    from runtime.scheduling.statistics import SchedulerStatistics

FILLER_TOKEN_ID = 1
# An engine whose scheduler holds requests back (a delayer, a time-out to come) looks again later.
POLL_S = 0.005
STUCK_AFTER_S = 600.0
# Ends a simulated request also under ignore_eos.
_STOP_IDS = frozenset({EOS_TOKEN_ID})


class Schedules(Protocol):
    """The part of `Scheduler` that a simulation uses."""

    @property
    def has_unfinished(self) -> bool: ...
    def add(self, request: Request, now: float) -> list[RequestOutput]: ...
    def abort(self, request_id: str, message: str | None = None) -> bool: ...
    def plan(self, now: float) -> Plan: ...
    def commit(
        self, batch: ScheduleBatch, output: StepOutput, now: float
    ) -> list[RequestOutput]: ...
    def stored(self, copy_id: int, pages: int) -> int: ...
    def loaded(self, load_id: int, pages: int) -> None: ...
    def statistics(self) -> SchedulerStatistics: ...


class Watches(Protocol):
    """Looks on while a simulation runs; changes nothing."""

    def launched(self, batch: ScheduleBatch) -> None:
        """A step was launched, and no pass has been made since it was planned."""

    def ended(self, request: Request) -> None:
        """A request has given its last output."""


@dataclass(frozen=True, slots=True)
class HostCost:
    """Seconds of host work in a turn of the loop: planning, committing, delivering."""

    step_s: float = 0.0
    row_s: float = 0.0


@dataclass(slots=True)
class RequestStats:
    """What a client would have measured.

    Args:
        first_s, last_s: time of the first and the last token; -1 while there is none.
        longest_gap_s: between two of its tokens; gap_end_s: when that one ended, -1 without.
    """

    request_id: str
    arrival_s: float
    input_tokens: int
    first_s: float = -1.0
    last_s: float = -1.0
    tokens: int = 0
    longest_gap_s: float = 0.0
    gap_end_s: float = -1.0
    cached_tokens: int = 0
    retractions: int = 0
    finish: Finish | None = None

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first."""
        return (self.last_s - self.first_s) / max(self.tokens - 1, 1)


@dataclass(slots=True)
class StepStats:
    """The steps that ran, as parallel columns; kinds are "prefill", "decode" and "mixed". starts_s
    is when the device began."""

    kinds: list[str] = field(default_factory=list)
    starts_s: array[float] = field(default_factory=lambda: array("d"))
    seconds: array[float] = field(default_factory=lambda: array("d"))
    prefill_tokens: array[int] = field(default_factory=lambda: array("i"))
    prefill_rows: array[int] = field(default_factory=lambda: array("i"))
    rows: array[int] = field(default_factory=lambda: array("i"))


@dataclass(slots=True)
class SimulationResult:
    """A simulation from the first arrival to the last token.

    Args:
        requests: in order of arrival. refused: ids that intake refused, with the reason.
        gaps_s: every gap between two tokens of one request.
        busy_s: what the device was busy of elapsed_s.
    """

    requests: list[RequestStats]
    refused: dict[str, str]
    steps: StepStats
    gaps_s: array[float]
    elapsed_s: float
    busy_s: float
    statistics: SchedulerStatistics


@dataclass(slots=True)
class _Launched:
    batch: ScheduleBatch
    output: StepOutput
    end_s: float


class Simulator:
    """One run of a scheduler over a list of arrivals. Use once."""

    def __init__(
        self,
        scheduler: Schedules,
        timer: StepTimer,
        *,
        overlap: bool = True,
        host: HostCost | None = None,
        tier: TierTimes | None = None,
        watch: Watches | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self._scheduler = scheduler
        self._timer = timer
        self._overlap = overlap
        self._host = host or HostCost()
        self._tier = SimulatedTier(tier or TierTimes())
        self._watch = watch
        self._device_free_s = 0.0
        self._busy_s = 0.0
        self._steps = StepStats()
        self._gaps = array("d")
        self._stats: dict[str, RequestStats] = {}
        self._refused: dict[str, str] = {}
        self.ended = 0  # requests, refused ones too
        self._script: dict[str, Arrival] = {}
        # Output index at which the request in a table row ends by itself, -1: never.
        self._stop_at: dict[int, int] = {}
        self._arrivals: Sequence[Arrival] = ()
        self._next = 0
        self._aborts: list[tuple[float, str]] = []
        self._idle_since_s = 0.0

    def run(self, arrivals: Sequence[Arrival]) -> SimulationResult:
        """Serves the arrivals (in order of time) until every one of them has ended.

        Raises: LoomserveError: the scheduler makes no progress though requests wait."""
        for _ in self.turns(arrivals):
            pass
        return self.result()

    def turns(self, arrivals: Sequence[Arrival]) -> Iterator[None]:
        """As `run`, but stands still after every turn of the loop, for a caller that has more to do
        than to wait; at the end there is a `result`.

        Raises: as `run`."""
        self._arrivals = arrivals
        in_flight: _Launched | None = None
        while True:
            self._advance(self.clock.now)
            plan = self._scheduler.plan(self.clock.now)
            self._deliver(plan.ended)
            self._tier.begin(plan, self.clock.now)
            launched = self._launch(plan.batch) if plan.batch is not None else None
            if in_flight is not None:
                self._commit(in_flight)
            elif launched is None and not self._wait(plan.reason):
                break
            if launched is not None and not self._overlap:
                self._commit(launched)
                launched = None
            in_flight = launched
            yield

    def _advance(self, time_s: float) -> None:
        """Goes on to a time; whatever arrives or leaves by then does so in its order."""
        while True:
            arrival_s = (
                self._arrivals[self._next].arrival_s
                if self._next < len(self._arrivals)
                else time_s + 1.0
            )
            tier_s = self._tier.end_s
            if tier_s is not None and tier_s <= min(arrival_s, time_s):
                self.clock.advance_to(max(tier_s, self.clock.now))
                self._end_copy()
            elif self._aborts and self._aborts[0][0] <= min(arrival_s, time_s):
                abort_s, request_id = heapq.heappop(self._aborts)
                self.clock.advance_to(max(abort_s, self.clock.now))
                self._scheduler.abort(request_id)
            elif arrival_s <= time_s:
                self.clock.advance_to(max(arrival_s, self.clock.now))
                self._arrive(self._arrivals[self._next])
                self._next += 1
            else:
                break
        self.clock.advance_to(time_s)

    def _end_copy(self) -> None:
        done = self._tier.take_done()
        if isinstance(done, PageLoad):
            self._scheduler.loaded(done.load_id, len(done.pages))
        else:
            self._scheduler.stored(done.copy_id, len(done.pages))

    def _arrive(self, arrival: Arrival) -> None:
        request = Request(
            request_id=arrival.request_id,
            input_ids=arrival.input_ids,
            sampling=SamplingParams(
                max_new_tokens=arrival.max_new_tokens,
                ignore_eos=arrival.ignore_eos,
                stop_token_ids=_STOP_IDS,
            ),
            arrival_s=self.clock.now,
            priority=arrival.priority,
            namespace=arrival.namespace,
            pins=arrival.pins,
        )
        try:
            displaced = self._scheduler.add(request, self.clock.now)
        except LoomserveError as error:
            self._refused[arrival.request_id] = str(error)
            self.ended += 1
            return
        self._script[arrival.request_id] = arrival
        self._stats[arrival.request_id] = RequestStats(
            arrival.request_id, self.clock.now, len(arrival.input_ids)
        )
        if arrival.abort_after_s is not None:
            leave_s = self.clock.now + arrival.abort_after_s
            heapq.heappush(self._aborts, (leave_s, arrival.request_id))
        self._deliver(displaced)

    def _launch(self, batch: ScheduleBatch) -> _Launched:
        """Queues a step behind the one that runs, once the host has prepared it."""
        host = self._host
        if host.step_s or host.row_s:
            self._advance(self.clock.now + host.step_s + host.row_s * len(batch.rows))
        work = StepWork.of(batch)
        seconds = self._timer.seconds(work)
        self._device_free_s = max(self.clock.now, self._device_free_s) + seconds
        self._busy_s += seconds
        steps = self._steps
        steps.kinds.append(batch.kind)
        steps.starts_s.append(self._device_free_s - seconds)
        steps.seconds.append(seconds)
        steps.prefill_tokens.append(work.prefill_tokens)
        steps.prefill_rows.append(batch.num_prefill)
        steps.rows.append(len(batch.rows))
        if self._watch is not None:
            self._watch.launched(batch)
        output = StepOutput(self._sample(batch), device_s=seconds)
        return _Launched(batch, output, self._device_free_s)

    def _sample(self, batch: ScheduleBatch) -> list[int]:
        """The tokens of a step: the request's script where it has one, its end where it is due."""
        script, stop_at = self._script, self._stop_at
        for i in range(batch.num_prefill):
            arrival = script[batch.requests[i].request_id]
            if arrival.ends_itself or arrival.output_ids is not None:
                stop_at[batch.rows[i]] = arrival.output_tokens - 1
            else:
                stop_at.pop(batch.rows[i], None)
        tokens = [FILLER_TOKEN_ID] * len(batch.sampled)
        if stop_at:
            rows, counts = batch.rows, batch.output_counts
            for k, i in enumerate(batch.sampled):
                if rows[i] in stop_at:
                    tokens[k] = self._scripted(batch.requests[i].request_id, counts[k])
        return tokens

    def _scripted(self, request_id: str, count: int) -> int:
        arrival = self._script[request_id]
        if count >= arrival.output_tokens - 1 and arrival.ends_itself:
            return EOS_TOKEN_ID
        ids = arrival.output_ids
        return ids[count] if ids is not None and count < len(ids) else FILLER_TOKEN_ID

    def _commit(self, step: _Launched) -> None:
        self._advance(max(step.end_s, self.clock.now))
        self._deliver(self._scheduler.commit(step.batch, step.output, self.clock.now))
        self._idle_since_s = self.clock.now

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        now, stats, gaps = self.clock.now, self._stats, self._gaps
        for output in outputs:
            request = output.request
            record = stats[request.request_id]
            count = len(output.token_ids)
            if count:
                if record.tokens:
                    gap = now - record.last_s
                    gaps.append(gap)
                    if gap > record.longest_gap_s:
                        record.longest_gap_s = gap
                        record.gap_end_s = now
                else:
                    record.first_s = now
                record.tokens += count
                record.last_s = now
            if output.finish is not None:
                record.finish = output.finish
                record.cached_tokens = request.cached_tokens
                record.retractions = request.retractions
                self.ended += 1
                if self._watch is not None:
                    self._watch.ended(request)

    def _wait(self, reason: str) -> bool:
        """Jumps to the next event when nothing runs; False: there is none, all is done."""
        pending = [self._arrivals[self._next].arrival_s] if self._next < len(self._arrivals) else []
        if self._aborts:
            pending.append(self._aborts[0][0])
        if self._tier.end_s is not None:
            pending.append(self._tier.end_s)
        if self._scheduler.has_unfinished:
            if not pending and self.clock.now - self._idle_since_s > STUCK_AFTER_S:
                raise LoomserveError(
                    f"nothing was scheduled for {STUCK_AFTER_S:.0f} s though requests wait"
                    f" (reason {reason!r})"
                )
            pending.append(self.clock.now + POLL_S)
        elif self._next >= len(self._arrivals):
            return False
        self._advance(max(min(pending), self.clock.now))
        return True

    @property
    def steps(self) -> int:
        """Steps launched so far."""
        return len(self._steps.kinds)

    def result(self) -> SimulationResult:
        """What happened until now; complete after the last turn."""
        start_s = self._arrivals[0].arrival_s if self._arrivals else 0.0
        return SimulationResult(
            requests=list(self._stats.values()),
            refused=self._refused,
            steps=self._steps,
            gaps_s=self._gaps,
            elapsed_s=max((r.last_s for r in self._stats.values()), default=start_s) - start_s,
            busy_s=self._busy_s,
            statistics=self._scheduler.statistics(),
        )


def completed(requests: Sequence[RequestStats]) -> list[RequestStats]:
    """Those that ended by a stop or at their length."""
    good = (FinishReason.STOP, FinishReason.LENGTH)
    return [r for r in requests if r.finish is not None and r.finish.reason in good]
