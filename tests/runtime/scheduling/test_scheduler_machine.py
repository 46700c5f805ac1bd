"""Random lives of a scheduler: every rule checked after every step, every token on a fake device."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from runtime.config import SchedulerConfig
from runtime.runner import StepOutput
from tests.runtime.scheduling.naive_model import NaiveModel
from tests.runtime.scheduling.random_lives import lives
from tests.runtime.scheduling.scheduler_harness import EOS, Driver, names, request
from tests.runtime.scheduling.scheduler_machine import (
    RecurrentMachine,
    SchedulerMachine,
    TieredMachine,
)

STEPS = 20_000


@pytest.mark.slow
def test_random_lives_break_no_rule() -> None:
    SchedulerMachine.steps = SchedulerMachine.cleared = 0
    run_state_machine_as_test(SchedulerMachine, settings=lives(200))
    assert SchedulerMachine.steps >= STEPS
    assert SchedulerMachine.cleared >= 1


@pytest.mark.slow
def test_random_lives_over_a_tier_break_no_rule() -> None:
    TieredMachine.steps = TieredMachine.loaded_tokens = TieredMachine.failed_loads = 0
    run_state_machine_as_test(TieredMachine, settings=lives(60))
    assert TieredMachine.loaded_tokens > 0
    assert TieredMachine.failed_loads > 0


@pytest.mark.slow
def test_random_lives_with_recurrent_states_break_no_rule() -> None:
    RecurrentMachine.steps = RecurrentMachine.cached_tokens = RecurrentMachine.cleared = 0
    run_state_machine_as_test(RecurrentMachine, settings=lives(60))
    assert RecurrentMachine.cached_tokens > 0


def test_an_ended_request_lets_go_of_what_a_failed_step_put_into_the_cache() -> None:
    """Found by random lives: r3 starts from what step 0 is to write, and ends; then step 0 fails."""
    state = SchedulerMachine()
    made = SchedulerConfig(
        page_size=64,
        max_running_requests=4,
        chunked_prefill_size=128,
        max_prefill_tokens=512,
        max_prefill_requests=2,
        truncation_align_size=128,
        disable_mixed_chunk=True,
        schedule_policy="hrrn",
        enable_prefill_delayer=True,
        delayer_max_passes=2,
        disable_priority_preemption=True,
        eviction_policy="lfu",
        max_queue_skip_ms=0.0,
        schedule_conservativeness=0.0,
        clip_max_new_tokens=4,
        max_queued_requests=4,
        priority_preemption_threshold=5,
        capacity_tokens=389,
        context_length=5000,
        eos_token_ids=frozenset({EOS}),
    )
    state.start(made=made, guilty=0, overlap=True)
    state.pass_time(seconds=0.02)
    state.plan_and_fail_to_launch()
    state.plan_and_fail_to_launch()
    state.add(count=7, extra="deadline", family=0, seed=1865)
    state.plan_and_fail_to_launch()
    state.end_one(kind="finish", pick=308)
    state.add(count=7, extra="", family=2, seed=0)
    state.end_one(kind="abort", pick=128)
    state.plan_and_fail_to_launch()
    assert len(state.driver.in_flight) == 2
    state.end_one(kind="abort", pick=121)
    state.end_one(kind="finish", pick=82)
    state.plan_and_fail_to_launch()
    state.fail_step(tables=True)
    assert state.scheduler.statistics().protected_tokens == 0
    state.teardown()


def test_a_row_that_starts_anew_anyway_says_nothing_of_its_pieces() -> None:
    """Found by random lives: two complete a prompt one after the other, on pages that they share;
    the first gives NaN, so that the second starts anew; then it gives NaN, too."""
    state = SchedulerMachine()
    made = SchedulerConfig(
        page_size=1,
        chunked_prefill_size=3,
        disable_mixed_chunk=True,
        priority_preemption_threshold=5,
        capacity_tokens=72,
        context_length=60,
        eos_token_ids=frozenset({EOS}),
    )
    state.start(made=made, guilty=0, overlap=True)
    state.leave_rubbish_behind(leaves=False, seed=2)
    state.come_back(crowd=0.9, pages=1, share=0.2)
    state.leave_rubbish_behind(leaves=False, seed=23)
    state.leave_rubbish_behind(leaves=False, seed=0)
    state.teardown()
    assert state.scheduler.counters.finished["error"] == 3, "whose prompts are NaN"


def test_who_has_gone_on_from_a_nan_state_gives_nan_and_is_retried_in_isolation() -> None:
    """Found by random lives: r6 saves a state beside KV that r4 has computed, r7 begins there, and
    r6 gives NaN. What r7 has read stays in the cache: it finds out by itself."""
    state = RecurrentMachine()
    made = SchedulerConfig(
        max_prefill_tokens=32,
        capacity_tokens=326,
        context_length=5000,
        eos_token_ids=frozenset({EOS}),
        step_bound_ms=3.0,
    )
    state.start(made=made, interval=100, overlap=True, guilty=0, slots=2)
    state.leave_rubbish_behind(leaves=False, seed=5)
    state.build_on_a_nan_prompt(seed=0)
    state.end_one(kind="abort", pick=1)
    state.come_back(crowd=0.3, pages=0, share=0.2)
    state.build_on_a_nan_prompt(seed=0)
    state.teardown()
    starts = [batch for batch in state.driver.batches if "r7" in names(batch)[: batch.num_prefill]]
    assert [batch.prefix_lens[names(batch).index("r7")] for batch in starts][:2] == [64, 0]
    assert state.driver.reason("r7") == "length"


def test_the_naive_model_refuses_what_was_never_written() -> None:
    driver = Driver(SchedulerConfig(page_size=1, capacity_tokens=101, context_length=60))
    model = NaiveModel(driver.scheduler, driver.device, mixing=True, cache=True)
    made = request("r0", 20, 1)
    driver.add(made)
    model.added(made)
    model.planned(driver.plan().batch, set())
    _, output = driver.in_flight[0]
    assert output is not None

    def commit() -> StepOutput:
        driver.commit()
        return output

    model.commit(commit)
    model.check()
    (root,) = driver.scheduler._memory.cache.tree.roots.values()
    (node,) = root.children.values()
    driver.device.slots[node.pages[7]] = 0
    with pytest.raises(AssertionError, match="7 tokens and the next 1 can be matched"):
        model.check()
