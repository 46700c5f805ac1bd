"""Views of the scheduler's state for metrics, debugging and self-checks. They change nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.request import RequestState
from runtime.scheduling.statistics import RequestDebug, SchedulerStatistics
from runtime.scheduling.wait_clocks import Reason

if TYPE_CHECKING:
    from runtime.request import Request
    from runtime.scheduling.admission import Admission
    from runtime.scheduling.lifecycle import Lifecycle


def take_statistics(
    life: Lifecycle, admission: Admission, ratio: float, invariant_error: str | None
) -> SchedulerStatistics:
    """A record of this moment."""
    allocator, cache = life.memory.allocator, life.memory.cache
    size = life.memory.page_size
    cached = cache.evictable_tokens + cache.protected_tokens
    reserved = (1 + allocator.deferred_pages) * size
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
        free_rows=life.memory.rows.num_free,
        full=admission.full,
        reason=admission.reason.value,
        new_token_ratio=ratio,
        chunk_tokens=admission.chunk_tokens or 0,
        slo_feasible=admission.sizer.feasible,
        predicted_step_s=admission.sizer.predicted_s,
        invariant_error=invariant_error,
        wait_seconds=life.clocks.totals_by_reason(),
        counters=replace(life.counters, finished=dict(life.counters.finished)),
    )


def debug_record(request: Request, life: Lifecycle) -> RequestDebug:
    """What /debug/requests shows of a live request."""
    record = request.scheduling
    blocked = record.own_reason
    if request.request_id in life.compiling:
        blocked = Reason.GRAMMAR.value
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
