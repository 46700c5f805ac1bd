"""Short prompts beside long ones: they do not wait for all of them, and do not stop them either."""

from __future__ import annotations

import math
from typing import Any

import pytest

from runtime.request import Request
from tests.runtime.scheduling.scheduler_harness import Driver, config, request

CHUNK = 64
LONG = 640
WITHIN = 6  # steps from arrival to the first token of a short prompt


def storm(count: int = 14, **options: Any) -> Driver:
    """So many long prompts at once; rows and pages for all."""
    values = {"page_size": 16, "capacity_tokens": 40_000, "max_running_requests": 64}
    driver = Driver(config(**{**values, "chunked_prefill_size": CHUNK, **options}))
    for number in range(count):
        driver.add(long_prompt(number))
    return driver


def long_prompt(number: int) -> Request:
    return request(f"long{number:02}", range(10_000 * number, 10_000 * number + LONG), 1)


def steps_to_first_token(driver: Driver, name: str) -> int:
    for steps in range(1, 10_000):
        driver.step()
        if driver.tokens[name]:
            return steps
    raise AssertionError("no token")


def last_long_after(driver: Driver, short_tokens: int, every: int) -> int:
    """Steps until the last long prompt is done, short ones of one token arriving all the time."""
    for steps in range(10_000):
        if all(name in driver.ended for name in driver.tokens if name.startswith("long")):
            return steps
        if every and steps % every == 0:
            driver.add(request(f"short{steps}", short_tokens, 1))
        driver.step()
    raise AssertionError("a long prompt starves")


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("tokens", [1, 16, 32, 64])
@pytest.mark.sampled(3)
def test_a_short_prompt_gets_its_first_token_within_six_steps(tokens: int, overlap: bool) -> None:
    driver = storm()
    driver.overlap = overlap
    for number in range(8):
        for _ in range(7):  # somewhere in the middle of one of them
            driver.step()
        driver.add(request(f"short{number}", tokens, 2))
        assert steps_to_first_token(driver, f"short{number}") <= WITHIN
    assert not driver.ended.get("long13"), "the storm is over, and this proves nothing"
    driver.run().assert_all_free()


def test_without_a_share_it_waits_for_all_of_them() -> None:
    driver = storm(prefill_share=0.0)
    driver.step()
    driver.add(request("short", 16, 2))
    assert steps_to_first_token(driver, "short") >= 14 * LONG // CHUNK


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("align", [0, 32, CHUNK])
@pytest.mark.parametrize("tokens", [5, 16, 40, 64])
@pytest.mark.sampled(6)
def test_long_prompts_are_put_off_by_no_more_than_the_share(
    share: float, align: int, tokens: int
) -> None:
    alone = last_long_after(storm(5, truncation_align_size=align), 1, every=0)
    driver = storm(5, prefill_share=share, truncation_align_size=align)
    beside = last_long_after(driver, tokens, every=1)
    assert beside <= math.ceil(alone / (1 - share)) + 1
    if share >= 0.25:
        assert any(name.startswith("short") for name in driver.ended)
    driver.run().assert_all_free()


def test_one_that_shorter_ones_have_passed_for_too_long_goes_before_them() -> None:
    """Its 64 tokens are four steps' share, which shorter prompts would use up all the time."""
    driver = storm(max_queue_skip_ms=200.0)
    driver.step()
    driver.add(request("middling", 64, 1))
    for number in range(100):
        driver.add(request(f"short{number}", 16, 1))
        driver.step()
        if "middling" in driver.ended:
            break
    assert 20 <= number <= 20 + 2 * WITHIN
    driver.run().assert_all_free()


def test_short_prompts_have_saved_up_their_share_of_four_steps_at_most() -> None:
    """Many that come together after a long silence: a quarter of each step, and four times that."""
    driver = storm(3)
    for _ in range(15):
        driver.step()
    driver.add(*[request(f"short{number}", 16, 1) for number in range(40)])
    before, steps = len(driver.batches), 4
    for _ in range(steps):
        driver.step()
    taken = 0
    for batch in driver.batches[before:]:
        rows = zip(batch.requests, batch.extend_lens, strict=True)
        taken += sum(tokens for r, tokens in rows if r.request_id.startswith("short"))
    assert CHUNK < taken <= (4 + steps) * CHUNK // 4
    driver.run().assert_all_free()


def test_nobody_is_put_off_by_what_matters_less() -> None:
    driver = Driver(config(page_size=16, capacity_tokens=4000, chunked_prefill_size=CHUNK))
    driver.add(request("long", LONG, 1, priority=3))
    driver.step()
    driver.add(request("short", 16, 1))
    while "long" not in driver.ended:
        assert not driver.tokens["short"]
        driver.step()
    driver.run().assert_all_free()


def test_a_prompt_that_is_cached_but_for_its_end_is_a_short_one() -> None:
    driver = storm(0)
    known = list(range(500_000, 500_000 + 512))
    driver.add(request("before", known, 1))
    driver.run()
    for number in range(5):
        driver.add(long_prompt(number))
    for _ in range(3):
        driver.step()
    driver.add(request("again", [*known, 7, 8, 9], 1))
    assert steps_to_first_token(driver, "again") <= WITHIN
    assert driver.scheduler.counters.cached_tokens >= 512


def test_short_prompts_leave_a_long_one_the_pages_it_will_need() -> None:
    """The pool holds the long prompt and one short one: they come one by one, and it goes on."""
    driver = storm(0, capacity_tokens=LONG + 12 * 16)
    driver.add(request("long", LONG, 4))
    driver.step()
    steps = 0
    while "long" not in driver.ended:
        driver.add(request(f"short{steps}", 16, 40))
        driver.step()
        steps += 1
    assert steps <= 2 * LONG // CHUNK
    assert driver.scheduler.counters.retractions == 0
    driver.run().assert_all_free()


def test_the_cap_on_prompts_of_a_step_counts_them() -> None:
    driver = storm(max_prefill_requests=1)
    driver.step()
    for number in range(5):
        driver.add(request(f"short{number}", 16, 1))
    while driver.scheduler.has_unfinished:
        driver.step()
        names = [r.request_id for r in driver.batches[-1].requests if not r.length]
        assert len(names) <= 1
    driver.assert_all_free()


def test_where_steps_are_sized_by_time_a_prompt_without_history_may_be_larger() -> None:
    """Behind 2,000 tokens a step takes 8 of the long prompt, and 96 of one that begins."""

    def seconds(new: int, before: int) -> float:
        return 0.001 + 1e-4 * new + 3e-7 * new * (new + 2 * before)

    driver = Driver(
        config(
            page_size=16,
            capacity_tokens=8000,
            context_length=8000,
            chunked_prefill_size=128,
            step_bound_ms=14.0,
        )
    )
    driver.add(request("long", 4000, 1))

    def turn() -> None:
        driver.plan()
        while len(driver.in_flight) > 1:
            batch, output = driver.in_flight[0]
            assert output is not None
            rows = zip(batch.extend_lens, batch.prefix_lens, strict=True)
            output.device_s = sum(seconds(*row) for row in rows)
            driver.commit()

    long = driver.scheduler._life.live["long"]
    while long.length < 2000:
        turn()
    assert driver.batches[-1].extend_lens[0] == 8
    driver.add(request("short", 64, 1))
    for _ in range(WITHIN):
        turn()
    assert driver.tokens["short"]


def test_chunks_that_wait_for_short_prompts_say_so() -> None:
    driver = storm(1, truncation_align_size=CHUNK)
    driver.step()
    reasons = set()
    for number in range(8):
        driver.add(request(f"short{number}", 16, 1))
        driver.step()
        reasons |= {r.blocked_by for r in driver.scheduler.requests if r.request_id == "long00"}
    assert reasons == {"", "chunk_budget"}
