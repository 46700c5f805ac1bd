"""Derives what the scheduler decides by from the options, once model and device are known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.config import STEP_BOUND_MS, SchedulerConfig, SchedulerOptions
from runtime.options import options_of
from runtime.scheduling.chunk_sizer import ChunkLoad, TimedChunkSizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.scheduling.step_time_model import MeasuredSteps


def size_scheduler(
    options: SchedulerOptions,
    *,
    capacity_tokens: int,
    context_length: int,
    eos_token_ids: frozenset[int],
    device_chunk_tokens: int | None,
    measure: Callable[[float], MeasuredSteps],
    tier: tuple[int, int] = (0, 0),
    state_slots: int | None = None,
) -> SchedulerConfig:
    """The options with what they leave open filled in.

    Where the device names a chunk size, that is the default. Where it names none, since a size
    means a tenth of a second on one machine and most of one on another, chunks are bounded by the
    predicted time of their step, from a model that starts with a measurement.

    Args:
        device_chunk_tokens: the size that the device has by default; None: it is timed.
        measure: times steps of the device until they near the given seconds; called only where
            chunks are sized by time.
        tier: pages that the tier below the pool holds, and the fewest tokens worth a load from it.
        state_slots: recurrent states that the device can keep; None: the model has none.
    Raises: ConfigError: the options do not fit what was derived.
    """
    given = {item.name: getattr(options, item.name) for item in options_of(SchedulerOptions)}
    given["state_slots"] = state_slots or 0
    sized = given["chunked_prefill_size"] is not None

    def made(**derived: Any) -> SchedulerConfig:
        return SchedulerConfig(
            capacity_tokens=capacity_tokens,
            context_length=context_length,
            eos_token_ids=eos_token_ids,
            kv_tier_pages=tier[0],
            kv_load_tokens=tier[1],
            recurrent=state_slots is not None,
            **{**given, **derived},
        )

    if device_chunk_tokens is not None:
        return made() if sized else made(chunked_prefill_size=device_chunk_tokens)
    if sized:
        timed = options.tpot_slo_ms > 0
        return made(measured_steps=measure(options.tpot_slo_ms / 1000)) if timed else made()
    bounded = made(
        chunked_prefill_size=0,
        step_bound_ms=STEP_BOUND_MS,
        enable_dynamic_chunking=False,
        measured_steps=measure(STEP_BOUND_MS / 1000),
    )
    if not options.enable_dynamic_chunking:
        return bounded
    # Equal times need a size to start from: what the bound allows for the first chunk.
    first = TimedChunkSizer(bounded).choose(ChunkLoad(history=0, rows=0, context=0)).tokens
    return made(chunked_prefill_size=max(first or 0, 2 * options.page_size))


def describe_chunks(config: SchedulerConfig) -> str:
    """How prompts are cut, for the start-up messages."""
    size, bound_ms, target_ms = (
        config.chunked_prefill_size,
        config.step_bound_ms,
        config.tpot_slo_ms,
    )
    if target_ms:
        most = f", by {size} tokens at most" if size > 0 else ""
        return f"prompts are cut so that a step takes {target_ms:g} ms while requests run{most}"
    if bound_ms:
        return f"prompts are cut so that a step takes {bound_ms:g} ms at most while requests run"
    if size <= 0:
        return "prompts are never cut"
    return f"prompts are cut into chunks of {size} tokens"
