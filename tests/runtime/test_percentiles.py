"""The one definition of a percentile."""

from __future__ import annotations

import random
import statistics

import pytest

from runtime.percentiles import percentile


def test_it_lies_between_the_closest_ranks() -> None:
    values = [15.0, 20.0, 35.0, 40.0, 50.0]
    found = [percentile(values, share) for share in (0.0, 0.05, 0.3, 0.4, 0.5, 1.0)]
    assert found == pytest.approx([15.0, 16.0, 23.0, 29.0, 35.0, 50.0])


@pytest.mark.parametrize("count", [2, 3, 100, 101])
def test_it_is_the_standard_library_s_inclusive_one(count: int) -> None:
    rng = random.Random(count)
    values = sorted(rng.expovariate(1.0) for _ in range(count))
    found = [percentile(values, i / 100) for i in range(1, 100)]
    assert found == pytest.approx(statistics.quantiles(values, n=100, method="inclusive"))


def test_one_value_is_each_of_its_percentiles() -> None:
    assert [percentile([7.0], share) for share in (0.0, 0.5, 0.99, 1.0)] == [7.0] * 4
