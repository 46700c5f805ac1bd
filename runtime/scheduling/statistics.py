"""What the scheduler tells of itself: frozen records for metrics and debugging, taken between
passes. Taking them changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from runtime.request import RequestState
from runtime.scheduling.accounting import BlockingTerm

if TYPE_CHECKING:
    from runtime.request import Request
    from runtime.scheduling.accounting import Counters
    from runtime.scheduling.admission import Admission
    from runtime.scheduling.lifecycle import Lifecycle


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """The scheduler at one moment. Tokens are ints, capacity the sum of the four kinds.

    Args:
        running: requests that decode; prefilling: 1 while a prompt is being cut into chunks.
        waiting: in the queue; waiting_grammar: outside it until their grammar is compiled.
        full: the last pass had to refuse somebody; reason: the blocking term.
        tier_tokens: what the tier below the pool holds.
        new_token_ratio: share of remaining output reserved.
        chunk_tokens: prefill tokens the last pass allowed a step; 0: not cut.
        slo_feasible: whether even the smallest chunk holds --tpot-slo-ms; None: no target, or
            too few steps measured.
        pinned_tokens: cached tokens that clients asked to be kept.
        pinned_evicted_tokens: such that had to go before their time, since start.
        predicted_step_s: what a chunk sizer by time predicted for the last step it sized, margin
            included.
        invariant_error: the last idle recount that failed.
    """

    running: int
    prefilling: int
    waiting: int
    waiting_grammar: int
    in_flight: int
    capacity_tokens: int
    free_tokens: int
    cached_tokens: int
    private_tokens: int
    reserved_tokens: int
    evictable_tokens: int
    protected_tokens: int
    pinned_tokens: int
    pinned_evicted_tokens: int
    free_rows: int
    tier_tokens: int
    full: bool
    reason: str
    new_token_ratio: float
    chunk_tokens: int
    slo_feasible: bool | None
    predicted_step_s: float | None
    invariant_error: str | None
    wait_seconds: dict[str, float]
    counters: Counters

    @property
    def active(self) -> int:
        """Requests that take part in steps."""
        return self.running + self.prefilling

    @property
    def queued(self) -> int:
        """Requests that take part in none yet."""
        return self.waiting + self.waiting_grammar

    @property
    def used_tokens(self) -> int:
        """KV tokens that the active ones hold, cached prefixes that they read included."""
        return (
            self.capacity_tokens - self.free_tokens - self.evictable_tokens - self.reserved_tokens
        )

    @property
    def kv_usage(self) -> float:
        """Their share of the pool, 0 to 1."""
        return self.used_tokens / max(1, self.capacity_tokens - self.reserved_tokens)


@dataclass(frozen=True, slots=True)
class RequestDebug:
    """One live request, for /debug/requests.

    Args:
        blocked_by: the term that keeps it from running now; "" when it runs.
        waited_s: seconds waited so far by blocking term.
    """

    request_id: str
    state: str
    priority: int
    input_tokens: int
    output_tokens: int
    max_new_tokens: int
    cached_tokens: int
    kv_tokens: int
    retractions: int
    blocked_by: str
    waited_s: dict[str, float]


def take_statistics(
    life: Lifecycle, admission: Admission, ratio: float, invariant_error: str | None
) -> SchedulerStatistics:
    """A record of this moment."""
    allocator, cache = life.memory.allocator, life.memory.cache
    size = life.memory.page_size
    cached = cache.evictable_tokens + cache.protected_tokens
    tier = life.memory.tier
    loading = 0 if tier is None else tier.loading_pages
    reserved = (1 + allocator.deferred_pages + loading) * size
    capacity = allocator.num_pages * size
    return SchedulerStatistics(
        running=len(life.running),
        prefilling=int(life.chunked is not None),
        waiting=len(life.queue),
        waiting_grammar=len(life.compiling),
        in_flight=len(life.inflight),
        capacity_tokens=capacity,
        free_tokens=allocator.free_tokens,
        cached_tokens=cached,
        private_tokens=capacity - allocator.free_tokens - cached - reserved,
        reserved_tokens=reserved,
        evictable_tokens=cache.evictable_tokens,
        protected_tokens=cache.protected_tokens,
        pinned_tokens=cache.pins.tokens,
        pinned_evicted_tokens=cache.pins.evicted_tokens,
        free_rows=len(life.memory.free_rows),
        tier_tokens=0 if tier is None else tier.tokens,
        full=admission.full,
        reason=admission.term.value,
        new_token_ratio=ratio,
        chunk_tokens=admission.size.tokens or 0,
        slo_feasible=admission.sizer.feasible,
        predicted_step_s=admission.size.predicted_s,
        invariant_error=invariant_error,
        wait_seconds=life.clocks.totals_by_term(),
        counters=replace(life.counters, finished=dict(life.counters.finished)),
    )


def debug_record(request: Request, life: Lifecycle) -> RequestDebug:
    """What /debug/requests shows of a live request."""
    record = request.scheduling
    blocked = record.own_term
    if request.request_id in life.compiling:
        blocked = BlockingTerm.GRAMMAR.value
    elif request.state is RequestState.WAITING and not blocked:
        blocked = life.clocks.current.value
    return RequestDebug(
        request_id=request.request_id,
        state=request.state.value,
        priority=request.priority,
        input_tokens=len(request.input_ids),
        output_tokens=len(request.output_ids),
        max_new_tokens=request.max_new_tokens,
        cached_tokens=request.cached_tokens,
        kv_tokens=request.length,
        retractions=request.retractions,
        blocked_by=blocked,
        waited_s=life.clocks.waited_seconds(request),
    )
