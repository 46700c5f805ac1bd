"""What the scheduler tells of itself: frozen records, taken between passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.scheduling.schedule_batch import ScheduleBatch


@dataclass(slots=True)
class Counters:
    """Totals since start.

    Args:
        cached_tokens: prompt tokens that admitted requests found in the cache;
            prompt_tokens: tokens that they brought, found or not.
        prefill_steps, decode_steps, mixed_steps: launched steps by kind; chunks: prefill rows.
        computed_tokens: tokens that launched steps compute.
        shared_prefix_skips: times a request was left for the next pass for a twin's sake.
    """

    steps: int = 0
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
    finished: dict[str, int] = field(default_factory=dict)  # by FinishReason value

    def count_step(self, batch: ScheduleBatch) -> None:
        """A step was launched."""
        self.steps += 1
        self.chunks += batch.num_prefill
        self.computed_tokens += batch.prefill_tokens + batch.num_decode
        if not batch.num_prefill:
            self.decode_steps += 1
        elif batch.num_decode:
            self.mixed_steps += 1
        else:
            self.prefill_steps += 1


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """The scheduler at one moment. Tokens are ints, capacity the sum of the four kinds.

    Args:
        running: requests that decode; prefilling: 1 while a prompt is being cut into chunks.
        waiting: in the queue; waiting_grammar: outside it until their grammar is compiled.
        full: the last pass had to refuse somebody; reason: why.
        new_token_ratio: share of remaining output reserved.
        chunk_tokens: prefill tokens the last pass allowed a step; 0: not cut.
        slo_feasible: whether even the smallest chunk holds --tpot-slo-ms; None: no target, or
            too few steps measured.
        predicted_step_s: what the SLO sizer predicted for the last chunk it chose, margin included.
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
    free_rows: int
    full: bool
    reason: str
    new_token_ratio: float
    chunk_tokens: int
    slo_feasible: bool | None
    predicted_step_s: float | None
    invariant_error: str | None
    wait_seconds: dict[str, float]
    counters: Counters


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
