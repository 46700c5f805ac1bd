"""What is counted and timed: totals since start; why a request waits and for how long; when its
time is up.

The queue is served in order, so what stops its head stops all behind it: one clock per blocking
term runs for the whole queue, and each request keeps a snapshot of the clocks from when it began
to wait. The few that a pass singles out (a twin left for the next pass) are corrected by hand. So
neither waiting nor a deadline costs anything in a pass in which it does not end.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from runtime.request import RequestState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from runtime.request import Request
    from runtime.scheduling.schedule_batch import ScheduleBatch

MIN_SWEEP = 1024  # deadlines kept before stale ones are looked for


@dataclass(slots=True)
class Counters:
    """Totals since start.

    Args:
        cached_tokens: prompt tokens that admitted requests found in the cache;
            prompt_tokens: tokens that they brought, found or not.
        prefill_steps, decode_steps, mixed_steps: launched steps by kind.
        chunks: prefill rows of launched steps; a prompt that is not cut is one chunk.
        computed_tokens: tokens that launched steps compute.
        stored_pages: copied to the tier below the pool; loaded_tokens: that came back from it.
        failed_copies, failed_loads: those of which not every page was done.
        shared_prefix_skips: times a request was left for the next pass for a twin's sake; shown in
            `/server_info` only.
    """

    prefill_steps: int = 0
    decode_steps: int = 0
    mixed_steps: int = 0
    chunks: int = 0
    admitted: int = 0
    retractions: int = 0
    preemptions: int = 0
    failed_steps: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    shared_prefix_skips: int = 0
    displaced: int = 0
    stored_pages: int = 0
    loaded_tokens: int = 0
    failed_copies: int = 0
    failed_loads: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # by FinishReason value

    def count_step(self, batch: ScheduleBatch) -> None:
        """A step was launched."""
        self.chunks += batch.num_prefill
        self.computed_tokens += batch.prefill_tokens + batch.num_decode
        if not batch.num_prefill:
            self.decode_steps += 1
        elif batch.num_decode:
            self.mixed_steps += 1
        else:
            self.prefill_steps += 1


class BlockingTerm(Enum):
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
    KV_LOAD = "kv_load"  # its prefix is being loaded from the tier below the pool


BLOCKING_TERMS = tuple(term for term in BlockingTerm if term is not BlockingTerm.NONE)
_INDEX: dict[BlockingTerm, int] = {term: index for index, term in enumerate(BLOCKING_TERMS)}


class WaitClocks:
    """Cumulative seconds per blocking term. `current` is what blocks the queue now."""

    def __init__(self) -> None:
        self.totals = [0.0] * len(BLOCKING_TERMS)
        self.current = BlockingTerm.NEXT_PASS
        self._apart = [0.0] * len(BLOCKING_TERMS)  # of requests that waited for a term of their own
        self._now: float | None = None
        self._singled_out: list[tuple[Request, BlockingTerm]] = []

    def advance(self, now: float) -> None:
        """Charges the time since the last call to what blocked the queue during it."""
        elapsed = 0.0 if self._now is None else max(now - self._now, 0.0)
        self._now = now if self._now is None else max(now, self._now)
        if not elapsed:
            return
        common = _INDEX[self.current]
        self.totals[common] += elapsed
        for request, term in self._singled_out:
            waited = request.scheduling.waited
            waited[_INDEX[term]] += elapsed
            self._apart[_INDEX[term]] += elapsed
            if request.row < 0:  # a waiting one also runs on the common clock
                waited[common] -= elapsed

    def new_pass(self, now: float) -> None:
        """Starts a pass: nobody is singled out any more."""
        self.advance(now)
        for request, _ in self._singled_out:
            request.scheduling.own_term = ""
        self._singled_out.clear()

    def single_out(self, request: Request, term: BlockingTerm) -> None:
        """Charges one request's time until the next pass to a term of its own."""
        request.scheduling.own_term = term.value
        self._singled_out.append((request, term))

    def begin(self, request: Request, now: float) -> None:
        """A request begins to wait in the queue."""
        self.advance(now)
        record = request.scheduling
        record.arrival_clocks = tuple(self.totals)
        if not record.waited:
            record.waited = [0.0] * len(BLOCKING_TERMS)

    def end(self, request: Request) -> None:
        """A request leaves the queue: its account is settled."""
        record = request.scheduling
        for index, before in enumerate(record.arrival_clocks):
            record.waited[index] += self.totals[index] - before
        record.arrival_clocks = ()
        self._singled_out = [pair for pair in self._singled_out if pair[0] is not request]

    def add(self, request: Request, term: BlockingTerm, seconds: float) -> None:
        """Charges a wait outside the queue."""
        record = request.scheduling
        if not record.waited:
            record.waited = [0.0] * len(BLOCKING_TERMS)
        record.waited[_INDEX[term]] += max(seconds, 0.0)
        self._apart[_INDEX[term]] += max(seconds, 0.0)

    def totals_by_term(self) -> dict[str, float]:
        """Seconds since start for which each term has blocked the queue, or, where it is a term
        of single requests, for which they have waited, summed over them."""
        both = zip(BLOCKING_TERMS, self.totals, self._apart, strict=True)
        return {term.value: queue + apart for term, queue, apart in both}

    def waited_seconds(self, request: Request) -> dict[str, float]:
        """Seconds waited so far per blocking term; terms without any are left out."""
        record = request.scheduling
        waited = record.waited or [0.0] * len(BLOCKING_TERMS)
        if record.arrival_clocks:
            waited = [
                w + total - before
                for w, total, before in zip(waited, self.totals, record.arrival_clocks, strict=True)
            ]
        return {
            term.value: seconds
            for term, seconds in zip(BLOCKING_TERMS, waited, strict=True)
            if seconds > 0
        }


class Limit(Enum):
    """What a deadline bounds."""

    TOTAL = "total"
    WAITING = "waiting"
    RUNNING = "running"


class Deadline(NamedTuple):
    """An end at `until_s`, unless the wait or run that began at `since_s` is over by then. Names
    its request instead of holding it: an answer long given must not stay in memory."""

    until_s: float
    order: int  # of deadlines made: no two compare equal before the names do
    request_id: str
    seq: int
    limit: Limit
    since_s: float


class Deadlines:
    """A heap of times. An entry whose request has moved on meanwhile is found stale when its time
    comes, or when stale ones have become the most."""

    def __init__(self) -> None:
        self._heap: list[Deadline] = []
        self._count = 0
        self._sweep_at = MIN_SWEEP

    def watch(
        self,
        request: Request,
        limit: Limit,
        since_s: float,
        until_s: float,
        live: Mapping[str, Request],
    ) -> None:
        """Calls for an end at `until_s` unless the request has ended, or has left the wait or run
        that began at `since_s`.

        Args:
            live: requests that have not ended, by id.
        """
        self._count += 1
        seq = request.scheduling.seq
        entry = Deadline(until_s, self._count, request.request_id, seq, limit, since_s)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > self._sweep_at:
            self._heap = [entry for entry in self._heap if _find(entry, live) is not None]
            heapq.heapify(self._heap)
            self._sweep_at = max(2 * len(self._heap), MIN_SWEEP)

    def expired(
        self, now: float, live: Mapping[str, Request]
    ) -> Iterator[tuple[Request, Deadline]]:
        """Takes out those whose time has come, one by one: the end of a request makes its other
        deadlines void."""
        while self._heap and self._heap[0].until_s <= now:
            entry = heapq.heappop(self._heap)
            request = _find(entry, live)
            if request is not None:
                yield request, entry


def _find(entry: Deadline, live: Mapping[str, Request]) -> Request | None:
    """The entry's request, if it is still what the entry bounds."""
    request = live.get(entry.request_id)
    if request is None:
        return None
    record = request.scheduling
    if record.seq != entry.seq or request.ending is not None:
        return None
    if entry.limit is Limit.WAITING:
        waiting = request.state is RequestState.WAITING
        return request if waiting and record.waiting_since_s == entry.since_s else None
    if entry.limit is Limit.RUNNING:
        return request if record.started_s == entry.since_s else None
    return request
