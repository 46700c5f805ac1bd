"""Why a request waits, and for how long, at a cost that does not grow with the queue.

The queue is served in order, so what stops its head stops all behind it: one clock per blocking
term runs for the whole queue, and each request keeps a snapshot of the clocks from when it began
to wait. The few that a pass singles out (a twin left for the next pass) are corrected by hand.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.request import Request


class Reason(Enum):
    """The term that kept a request from being admitted."""

    NONE = ""
    NEXT_PASS = "next_pass"  # arrived since the last pass; nothing has refused it
    ROWS = "rows"  # every row of the block table is taken
    KV_TOTAL = "kv_total"  # the forecast of what all admitted will need
    KV_STEP = "kv_step"  # pages free in this step
    INPUT_BUDGET = "input_budget"  # max_prefill_tokens
    CHUNK_BUDGET = "chunk_budget"  # the chunk size, used up by those before it
    DELAYER = "delayer"
    POLICY = "policy"  # the cap on prompts per step, or on how far a pass looks down the queue
    SHARED_PREFIX = "shared_prefix"  # a twin is about to fill the cache for it
    GRAMMAR = "grammar"  # its grammar is being compiled
    RETRACTED = "retracted"  # a pass that retracts admits nobody


WAIT_REASONS = tuple(reason for reason in Reason if reason is not Reason.NONE)
_INDEX: dict[Reason, int] = {reason: index for index, reason in enumerate(WAIT_REASONS)}


class WaitClocks:
    """Cumulative seconds per blocking term. `current` is what blocks the queue now."""

    def __init__(self) -> None:
        self.totals = [0.0] * len(WAIT_REASONS)
        self.current = Reason.NEXT_PASS
        self._apart = [0.0] * len(WAIT_REASONS)  # of requests that waited for a term of their own
        self._now: float | None = None
        self._singled_out: list[tuple[Request, Reason]] = []

    def advance(self, now: float) -> None:
        """Charges the time since the last call to what blocked the queue during it."""
        elapsed = 0.0 if self._now is None else max(now - self._now, 0.0)
        self._now = now if self._now is None else max(now, self._now)
        if not elapsed:
            return
        common = _INDEX[self.current]
        self.totals[common] += elapsed
        for request, reason in self._singled_out:
            waited = request.scheduling.waited
            waited[_INDEX[reason]] += elapsed
            self._apart[_INDEX[reason]] += elapsed
            if request.row < 0:  # a waiting one also runs on the common clock
                waited[common] -= elapsed

    def new_pass(self, now: float) -> None:
        """Starts a pass: nobody is singled out any more."""
        self.advance(now)
        for request, _ in self._singled_out:
            request.scheduling.own_reason = ""
        self._singled_out.clear()

    def single_out(self, request: Request, reason: Reason) -> None:
        """Charges one request's time until the next pass to a term of its own."""
        request.scheduling.own_reason = reason.value
        self._singled_out.append((request, reason))

    def begin(self, request: Request, now: float) -> None:
        """A request begins to wait in the queue."""
        self.advance(now)
        record = request.scheduling
        record.arrival_clocks = tuple(self.totals)
        if not record.waited:
            record.waited = [0.0] * len(WAIT_REASONS)

    def end(self, request: Request) -> None:
        """A request leaves the queue: its account is settled."""
        record = request.scheduling
        for index, before in enumerate(record.arrival_clocks):
            record.waited[index] += self.totals[index] - before
        record.arrival_clocks = ()
        self._singled_out = [pair for pair in self._singled_out if pair[0] is not request]

    def add(self, request: Request, reason: Reason, seconds: float) -> None:
        """Charges a wait outside the queue."""
        record = request.scheduling
        if not record.waited:
            record.waited = [0.0] * len(WAIT_REASONS)
        record.waited[_INDEX[reason]] += max(seconds, 0.0)
        self._apart[_INDEX[reason]] += max(seconds, 0.0)

    def totals_by_reason(self) -> dict[str, float]:
        """Seconds since start for which each term has blocked the queue, or, where it is a term
        of single requests, for which they have waited, summed over them."""
        both = zip(WAIT_REASONS, self.totals, self._apart, strict=True)
        return {reason.value: queue + apart for reason, queue, apart in both}

    def waited_seconds(self, request: Request) -> dict[str, float]:
        """Seconds waited so far per blocking term; terms without any are left out."""
        record = request.scheduling
        waited = record.waited or [0.0] * len(WAIT_REASONS)
        if record.arrival_clocks:
            waited = [
                w + total - before
                for w, total, before in zip(waited, self.totals, record.arrival_clocks, strict=True)
            ]
        return {
            reason.value: seconds
            for reason, seconds in zip(WAIT_REASONS, waited, strict=True)
            if seconds > 0
        }
