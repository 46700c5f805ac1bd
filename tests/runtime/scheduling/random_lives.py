"""What random lives of a scheduler are drawn from: options, prompts, tokens, times."""

from __future__ import annotations

import random
import zlib

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from runtime.config import SchedulerConfig
from runtime.request import PromptPin
from runtime.scheduling.policies import EVICTION_POLICIES, POLICIES
from runtime.scheduling.schedule_batch import ScheduleBatch
from tests.runtime.scheduling.scheduler_harness import EOS


def lives(examples: int, steps: int = 40) -> settings:
    """Of so many random lives, of so many calls each: always the same ones, however long they take."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


class SwitchGrammar:
    """Compiled when the test says so.

    Args:
        fault: where it raises, if anywhere: when asked for the "mask" of a token, or "taking" it.
        index: of that output token.
    """

    def __init__(self, fault: str = "", index: int = 0) -> None:
        self.ready = False
        self.fault = fault
        self.index = index


def script(request_id: str, index: int) -> int:
    """A token per request and position; about one in 60 is EOS."""
    value = zlib.crc32(f"{request_id}/{index}".encode())
    return EOS if value % 60 == 0 else 100 + value % 50


def random_pins(rng: random.Random, tokens: int) -> tuple[PromptPin, ...]:
    """What a client wants to be kept of a prompt."""
    return tuple(
        PromptPin(
            rng.choice([tokens, rng.randint(1, max(tokens, 1))]),
            rng.choice([0.03, 0.3, 9.0]),
            rng.choice(["", "", "one", "other"]),
        )
        for _ in range(rng.choice([0, 0, 1, 2]))
    )


def step_seconds(batch: ScheduleBatch) -> float:
    """Grows with the square of what a step computes, so that chunks are fitted to their history."""
    square = sum(
        new * (new + 2 * before)
        for new, before in zip(batch.extend_lens, batch.prefix_lens, strict=True)
    )
    return 0.001 + 1e-4 * batch.prefill_tokens + 1e-6 * square + 1e-4 * (batch.step % 7)


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    page = draw(st.sampled_from([1, 16, 64]))
    pages = draw(st.integers(6, {1: 120, 16: 40, 64: 14}[page]))
    chunk = draw(st.sampled_from([0, 2, 3, 8])) * page
    most = draw(st.sampled_from([2, 8, 1000])) * page
    return SchedulerConfig(
        page_size=page,
        capacity_tokens=pages * page + draw(st.integers(0, page - 1)),
        context_length=draw(st.sampled_from([60, 5000, 5000])),
        eos_token_ids=frozenset([EOS]),
        max_running_requests=draw(st.integers(1, 8)),
        chunked_prefill_size=chunk,
        max_prefill_tokens=most,
        prefill_share=draw(st.sampled_from([0.0, 0.25, 0.25, 0.9])),
        max_prefill_requests=draw(st.sampled_from([0, 0, 1, 2])),
        truncation_align_size=draw(st.sampled_from([0, 0, 2 * page, min(chunk, most)])),
        disable_mixed_chunk=draw(st.sampled_from([False, False, True])),
        disable_radix_cache=draw(st.sampled_from([False, False, True])),
        eviction_policy=draw(st.sampled_from(tuple(EVICTION_POLICIES))),
        pin_share=draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])),
        schedule_policy=draw(st.sampled_from(tuple(POLICIES))),
        max_queue_skip_ms=draw(st.sampled_from([0.0, 50.0, 2000.0])),
        schedule_conservativeness=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        clip_max_new_tokens=draw(st.sampled_from([4, 4096])),
        enable_dynamic_chunking=draw(st.booleans()),
        tpot_slo_ms=draw(st.sampled_from([0.0, 0.0, 3.0])),
        step_bound_ms=draw(st.sampled_from([0.0, 0.0, 3.0])),
        enable_prefill_delayer=draw(st.sampled_from([False, True])),
        delayer_max_passes=draw(st.integers(0, 5)),
        max_queued_requests=draw(st.sampled_from([0, 0, 4, 12])),
        priority_preemption_threshold=draw(st.sampled_from([0, 5])),
        disable_priority_preemption=draw(st.booleans()),
        kv_tier_pages=draw(st.sampled_from([0, 3, pages, 4 * pages])),
        kv_load_tokens=draw(st.sampled_from([0, 0, 0, 3])) * page,
        waiting_timeout_s=draw(st.sampled_from([0.0, 0.0, 0.0, 0.5])),
        running_timeout_s=draw(st.sampled_from([0.0, 0.0, 0.0, 0.5])),
    )
