"""When prompts are held back so that they come together, and for how long at most."""

from __future__ import annotations

from typing import Any

from runtime.scheduling.prefill_delayer import PrefillDelayer
from tests.runtime.scheduling.scheduler_harness import config

BUSY: dict[str, Any] = {"waiting": 1, "running": 8, "free_rows": 4, "kv_usage": 0.5}


def delayer(**options) -> PrefillDelayer:
    """One that has seen a step of four prompts."""
    made = PrefillDelayer(config(delayer_low_watermark=0.3, **options))
    made.finalize(4)
    return made


def test_few_prompts_wait_for_more():
    assert not delayer().allow(0.0, **BUSY)
    assert delayer().allow(0.0, **{**BUSY, "waiting": 2}), "a quarter of those that run"


def test_a_pool_that_is_little_used_is_filled_and_who_runs_alone_delays_nobody():
    assert delayer().allow(0.0, **{**BUSY, "kv_usage": 0.29})
    assert not delayer().allow(0.0, **{**BUSY, "kv_usage": 0.3})
    assert delayer().allow(0.0, **{**BUSY, "running": 0})


def test_so_many_passes_at_most():
    made = delayer(delayer_max_passes=3)
    assert [made.allow(0.0, **BUSY) for _ in range(5)] == [False] * 3 + [True] * 2
    made.finalize(1)
    assert not made.allow(0.0, **BUSY), "counted anew after a step with prompts"


def test_so_long_at_most():
    made = delayer(delayer_max_ms=500.0)
    assert [made.allow(now, **BUSY) for now in (1.0, 1.4, 1.5)] == [False, False, True]
