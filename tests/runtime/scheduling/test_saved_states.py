"""Recurrent states beside cached prefixes: where they are saved, gone on from, and given up."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.config import SchedulerConfig
from runtime.errors import ConfigError
from runtime.request import PromptPin
from runtime.scheduling.schedule_batch import ScheduleBatch
from tests.runtime.scheduling.scheduler_harness import Driver, config, request


def recurrent(**changes: Any) -> SchedulerConfig:
    values = {"page_size": 4, "capacity_tokens": 404, "chunked_prefill_size": 32}
    values |= {"recurrent": True, "state_slots": 6, "state_interval": 16}
    return config(**{**values, **changes})


def saved(batch: ScheduleBatch) -> list[tuple[str, int]]:
    """(request, position) of each state that a step saves."""
    return [
        (batch.requests[row].request_id, batch.prefix_lens[row] + tokens)
        for row, tokens in zip(batch.save_rows, batch.save_tokens, strict=True)
    ]


def starts(driver: Driver, name: str) -> int:
    """Where a request has begun to compute."""
    batches = [batch for batch in driver.batches if name in [r.request_id for r in batch.requests]]
    row = [made.request_id for made in batches[0].requests].index(name)
    return batches[0].prefix_lens[row]


def kept(driver: Driver) -> list[int]:
    """Positions of the states that a match may end at, the one unused for longest first."""
    return [state.position for state in driver.scheduler._memory.states or ()]


def serve(driver: Driver, *names_and_tokens: tuple[str, Any]) -> None:
    """One after the other."""
    for name, tokens in names_and_tokens:
        driver.add(request(name, tokens))
        driver.run()


def test_states_are_saved_at_every_interval_and_at_the_last_page_border() -> None:
    driver = Driver(recurrent())
    serve(driver, ("a", 55))
    assert [saved(batch) for batch in driver.batches[:2]] == [
        [("a", 16), ("a", 32)],
        [("a", 48), ("a", 52)],
    ]
    # One token is always left to compute.
    serve(driver, ("b", 8))
    assert kept(driver) == [16, 32, 48, 52, 4]


def test_of_what_is_generated_the_newest_state_is_kept_until_the_request_ends() -> None:
    driver = Driver(recurrent(state_slots=2))
    driver.add(request("a", tokens := list(range(500, 509)), 60))
    driver.run()
    assert [end for batch in driver.batches for _, end in saved(batch)] == [8, 16, 32, 48, 64]
    assert kept(driver) == [8, 64]
    serve(driver, ("next turn", [*tokens, *driver.tokens["a"], 1, 2, 3]))
    assert starts(driver, "next turn") == 64


def test_rows_of_one_step_do_not_take_the_last_slot_from_one_another() -> None:
    driver = Driver(recurrent(state_slots=1))
    driver.add(request("a", 9, 20), request("b", 9, 20))
    driver.run()
    steps = [saved(batch) for batch in driver.batches if batch.save_rows]
    assert steps == [[("a", 8)], [("a", 16)]]


def test_a_retracted_request_goes_on_from_what_it_has_generated() -> None:
    driver = Driver(recurrent(capacity_tokens=154, schedule_conservativeness=0.0))
    driver.add(request("a", 9, 70), request("b", 9, 70))
    driver.run()
    again = driver.ended["b"].request
    assert again.retractions == 1
    assert again.scheduling.prefix_tokens == 64
    assert again.cached_tokens == 0


def test_an_interval_is_in_whole_pages() -> None:
    driver = Driver(recurrent(state_interval=6))
    serve(driver, ("a", 21))
    assert kept(driver) == [8, 16, 20, 24]  # of 21 tokens and 4 that are generated


def test_a_match_ends_at_the_deepest_state_that_is_left() -> None:
    driver = Driver(recurrent())
    tokens = list(range(500, 555))
    serve(driver, ("a", tokens), ("same", tokens), ("longer", [*tokens, 1, 2, 3, 4]))
    serve(driver, ("alike", [*tokens[:45], *range(30)]), ("early", [*tokens[:15], *range(30)]))
    found = [starts(driver, name) for name in ("same", "longer", "alike", "early")]
    assert found == [52, 52, 32, 0]
    assert driver.ended["same"].request.cached_tokens == 52
    driver.assert_all_free()


def test_where_a_pin_ends_a_state_is_saved_and_goes_last() -> None:
    driver = Driver(recurrent(state_slots=2))
    tokens = list(range(500, 555))
    driver.add(request("a", tokens[:34], pins=(PromptPin(24, 100.0),)))
    driver.run()
    assert kept(driver) == [24, 32]
    serve(driver, ("b", 9), ("c", 9), ("d", 9), ("e", tokens))
    assert starts(driver, "e") == 24


def test_the_state_unused_for_longest_makes_way() -> None:
    driver = Driver(recurrent(state_slots=2))
    a, b, c = (range(at, at + 9) for at in (100, 200, 300))
    serve(driver, ("a", a), ("b", b), ("a again", a), ("c", c), ("a third", a), ("b again", b))
    assert [starts(driver, name) for name in ("a again", "a third", "b again")] == [8, 8, 0]


def test_of_a_prompt_with_more_states_than_slots_the_deepest_are_kept() -> None:
    driver = Driver(recurrent(state_slots=2, chunked_prefill_size=0))
    serve(driver, ("a", 90))
    assert kept(driver) == [80, 88]


def test_without_slots_nothing_is_cached() -> None:
    driver = Driver(recurrent(state_slots=0))
    serve(driver, ("a", range(40)), ("same", range(40)))
    assert starts(driver, "same") == 0


def test_a_state_goes_with_its_pages() -> None:
    driver = Driver(recurrent(capacity_tokens=104))
    serve(driver, ("a", range(60)), ("b", 60))
    assert len(kept(driver)) < 8
    memory = driver.scheduler._memory
    assert memory.states is not None
    assert len(memory.states.free_slots()) == 6 - len(kept(driver))
    assert driver.scheduler.flush()
    assert len(memory.states.free_slots()) == 6


def test_a_step_may_save_where_another_of_its_rows_goes_on_from() -> None:
    driver = Driver(recurrent(state_slots=1))
    serve(driver, ("a", range(9)))
    driver.add(request("other", 9), request("a again", range(9)))
    batch = driver.plan().batch
    assert batch is not None
    assert saved(batch) == [("other", 8)]
    assert list(batch.state_slots) == list(batch.save_slots)
    assert batch.prefix_lens[1] == 8
    driver.run()


def test_twins_wait_for_the_state_of_the_first() -> None:
    """Though there is none yet where the first one's cached part ends."""
    driver = Driver(recurrent(state_interval=64))
    tokens = list(range(500, 590))
    driver.add(request("a", tokens), request("b", tokens))
    driver.run()
    assert (starts(driver, "a"), starts(driver, "b")) == (0, 64)


@pytest.mark.parametrize("overlap", [True, False])
def test_what_a_failed_step_was_to_save_is_given_up(overlap: bool) -> None:
    """Also where the KV below it was in the cache before, and stays."""
    driver = Driver(recurrent(state_slots=1), overlap=overlap)
    tokens = range(500, 530)
    serve(driver, ("a", tokens), ("other", 9))  # whose state takes the place of a's
    driver.add(request("b", tokens))
    driver.plan()
    assert kept(driver) == [28]
    if overlap:
        driver.plan()
    driver.fail()
    assert kept(driver) == []
    driver.run()
    serve(driver, ("c", tokens))
    assert driver.reason("b") == "error"
    assert starts(driver, "c") == 0


@pytest.mark.parametrize("leaves", [True, False])
def test_a_nan_state_is_not_gone_on_from_twice(leaves: bool) -> None:
    """It stands beside KV that is finite and stays, since somebody has had tokens from it. Who left
    it may have gone before that showed: then the first who goes on from it is computed anew."""
    driver = Driver(recurrent(state_slots=4, state_interval=40))
    tokens = list(range(500, 620))

    def answer(name: str, prompt: Any) -> None:
        driver.add(request(name, prompt))
        while name not in driver.ended:
            driver.step()

    driver.add(request("a", tokens, 100))
    for name in "uvwxy":
        answer(name, 9)
    assert kept(driver) == [8] * 4
    driver.device.spoilers["bad"] = None
    if leaves:
        driver.add(request("bad", tokens))
        for _ in range(3):
            driver.step()
        driver.scheduler.abort("bad")
        driver.step()
        assert max(kept(driver)) > 8
    else:
        answer("bad", tokens)
        assert driver.reason("bad") == "error"
    for name in "bc":
        answer(name, tokens)
        assert driver.reason(name) == "length"
    assert "a" not in driver.ended
    assert driver.ended["b"].request.retractions == leaves
    assert driver.ended["c"].request.retractions == 0
    driver.run()


def test_a_node_with_a_state_stays_one_where_its_last_child_but_one_is_evicted() -> None:
    driver = Driver(recurrent(capacity_tokens=124, state_slots=20, eviction_policy="fifo"))
    base = list(range(500, 509))
    serve(driver, ("a", base), ("b", [*base[:8], *range(20)]), ("c", [*base[:8], *range(50, 70)]))
    serve(driver, ("filler", 96))
    (root,) = driver.scheduler._memory.cache.tree.roots.values()
    (node,) = [node for node in root.children.values() if node.end == 8]
    assert len(node.children) == 1
    serve(driver, ("a again", base))
    assert starts(driver, "c") == starts(driver, "a again") == 8


def test_there_is_no_tier_below_a_pool_with_recurrent_states() -> None:
    with pytest.raises(ConfigError, match="kv_tier_pages 3 with a recurrent state"):
        recurrent(kv_tier_pages=3)
