"""The search for a rate against servers with a known limit, and ratios of known runs."""

from __future__ import annotations

import pytest

from server.bench.compare import in_turn, ratios
from server.bench.search import highest_rate


@pytest.mark.parametrize("limit", [0.03, 0.9, 1.0, 37.0, 900.0])
async def test_the_highest_rate_is_found_to_within_the_precision(limit):
    async def keeps(rate: float) -> bool:
        return rate <= limit

    found = await highest_rate(keeps, 1.0, 40)
    assert found.highest is not None
    assert found.lowest_missed is not None
    assert found.highest <= limit < found.lowest_missed <= found.highest * 1.05
    rates = [rate for rate, _ in found.trials]
    assert len(set(rates)) == len(rates)


@pytest.mark.parametrize(("answer", "highest", "missed"), [(True, 8.0, None), (False, None, 0.125)])
async def test_a_limit_that_is_never_met_ends_with_the_trials(answer, highest, missed):
    tried = []

    async def keeps(rate: float) -> bool:
        tried.append(rate)
        return answer

    found = await highest_rate(keeps, 1.0, 4)
    assert len(tried) == 4
    assert (found.highest, found.lowest_missed) == (highest, missed)


async def test_pairs_alternate_who_goes_first():
    order = []

    def named(name: str):
        async def one(pair: int) -> str:
            order.append(f"{name}{pair}")
            return f"{name}{pair}"

        return one

    assert await in_turn(3, named("a"), named("b")) == [("a0", "b0"), ("a1", "b1"), ("a2", "b2")]
    assert order == ["a0", "b0", "b1", "a1", "a2", "b2"]


def test_ratios_are_of_each_pair_and_their_median():
    def summary(rate: float, gap: float | None = None):
        return {"output_tokens_per_s": rate, "itl_ms": gap and {"max": gap}}

    found = ratios(
        [
            (summary(100.0, 50.0), summary(200.0, 5.0)),
            (summary(100.0), summary(150.0, 5.0)),
            (summary(10.0, 0.0), summary(40.0, 5.0)),
        ]
    )
    assert found == {
        "output_tokens_per_s": {"median": 2.0, "min": 1.5, "max": 4.0, "pairs": 3},
        "itl_ms.max": {"median": 0.1, "min": 0.1, "max": 0.1, "pairs": 1},
    }
