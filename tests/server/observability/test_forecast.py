"""Expected starts, beside when requests really start."""

from __future__ import annotations

import pytest

from runtime.scheduling.glance import Holder
from server.observability.forecast import Rates, Waiting, expected_starts
from tests.runtime.scheduling.scheduler_harness import Driver, config, request

PACE = Rates(prompt_tokens_s=100.0, step_s=0.1, output_tokens=None)


def test_prompts_wait_for_those_before_them():
    """50 tokens of a pending prompt at 100 a second, then prompts of 100 and 20."""
    starts = expected_starts(
        [Waiting(100, 5), Waiting(20, 5), Waiting(10, 5)],
        [Holder(50, 0, 5, 30)],
        PACE,
        free_rows=10,
        free_tokens=10_000,
    )
    assert starts == pytest.approx([0.5, 1.5, 1.7])


def test_a_row_comes_free_when_the_first_answer_ends():
    """Two rows, with 30 and 10 tokens left at 0.1 s each; the third waiting one needs the row of
    the first, which starts at 1.0, computes 0.1 s and answers with 5 tokens."""
    starts = expected_starts(
        [Waiting(10, 5), Waiting(10, 5)],
        [Holder(0, 10, 40, 50), Holder(0, 0, 10, 40)],
        PACE,
        free_rows=0,
        free_tokens=10_000,
    )
    assert starts == pytest.approx([1.0, 1.6])


def test_kv_comes_free_in_the_order_of_the_ends():
    holders = [Holder(0, 0, 10, 60), Holder(0, 0, 20, 60)]
    (start,) = expected_starts([Waiting(80, 20)], holders, PACE, free_rows=5, free_tokens=0)
    assert start == pytest.approx(2.0), "the first end frees 60 tokens, which is not enough for 100"


def test_answers_are_expected_to_be_as_long_as_they_were():
    rates = Rates(100.0, 0.1, output_tokens=20.0)
    assert [rates.left(0, 500), rates.left(15, 500), rates.left(0, 8), rates.left(60, 500)] == [
        *(20.0, 5.0, 8.0, 20.0)
    ]


def test_the_forecast_is_what_happens():
    """The scheduler itself, a step every 10 ms: eight requests for two rows."""
    driver = Driver(config(max_running_requests=2), step_s=0.01)
    made = [request(f"r{number}", 8, 10 + 3 * number) for number in range(8)]
    driver.add(*made)
    driver.step()
    begin = driver.now
    now = driver.scheduler.statistics()
    waiting = driver.scheduler.glance(10, 1)
    expected = expected_starts(
        [Waiting(one.input_tokens, one.max_new_tokens) for one in waiting.waiting],
        waiting.holders,
        Rates(8 / 0.01, 0.01, None),
        free_rows=now.free_rows,
        free_tokens=now.free_tokens,
    )
    started: dict[str, float] = {}
    while driver.scheduler.has_unfinished:
        driver.step()
        for one in made:
            if one.scheduling.started_s is not None:
                started.setdefault(one.request_id, one.scheduling.started_s - begin)
    real = [started[one.request_id] for one in waiting.waiting]
    assert expected == pytest.approx(real, abs=0.08), "within a few steps of 10 ms"
    assert real[-1] > 0.4
