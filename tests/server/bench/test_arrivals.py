"""Arrival processes against the distributions they are named for, with fixed seeds."""

from __future__ import annotations

from itertools import islice, pairwise

import numpy as np
import pytest
from scipy import stats

from runtime.errors import ConfigError
from server.bench.arrivals import Arrivals

COUNT = 4000


def times(arrivals: Arrivals, count: int = COUNT, seed: int = 1) -> list[float]:
    return list(islice(arrivals.times(count, seed), count))


@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_gaps_of_poisson_arrivals_are_exponential(rate):
    gaps = np.diff(times(Arrivals("poisson", rate)), prepend=0.0)
    assert stats.kstest(gaps, "expon", args=(0, 1 / rate)).pvalue > 0.01


def test_counts_of_poisson_arrivals_in_equal_windows_vary_as_much_as_they_are():
    """What tells a Poisson process from others of exponential gaps: counts are Poisson too."""
    counts = np.histogram(times(Arrivals("poisson", 10.0)), bins=np.arange(0.0, 390.0))[0]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.2)


def test_constant_arrivals_are_equally_far_apart():
    assert times(Arrivals("constant", 4.0), 5) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_bursts_arrive_together_and_hold_the_rate():
    found = times(Arrivals("burst", 6.0, burst_size=3), 9)
    assert found == [0.0] * 3 + [0.5] * 3 + [1.0] * 3


@pytest.mark.parametrize(("rate", "ramp_to"), [(2.0, 50.0), (50.0, 2.0), (5.0, 5.0)])
def test_a_ramp_s_rate_grows_evenly_to_its_end(rate, ramp_to):
    """By the time-rescaling theorem: with the integral of the stated rate as the clock, arrivals
    are a Poisson process of rate 1."""
    found = np.array(times(Arrivals("ramp", rate, ramp_to=ramp_to)))
    end = 2 * COUNT / (rate + ramp_to)
    inside = np.minimum(found, end)
    expected = rate * inside + (ramp_to - rate) * inside**2 / (2 * end)
    expected += ramp_to * (found - inside)
    gaps = np.diff(expected, prepend=0.0)
    assert stats.kstest(gaps, "expon").pvalue > 0.01
    assert expected[-1] == pytest.approx(COUNT, abs=4 * COUNT**0.5)


@pytest.mark.parametrize("kind", ["poisson", "ramp"])
def test_a_seed_fixes_the_times(kind):
    arrivals = Arrivals(kind, 3.0, ramp_to=9.0 if kind == "ramp" else None)
    assert times(arrivals, 50) == times(arrivals, 50)
    assert times(arrivals, 50) != times(arrivals, 50, seed=2)
    assert all(later >= earlier for earlier, later in pairwise(times(arrivals, 50)))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"kind": "weekly"}, "weekly: must be one of poisson, constant, burst, ramp"),
        ({"rate": 0.0}, "--rate 0: must be above 0"),
        ({"burst_size": 0}, "--burst-size 0: must be at least 1"),
        ({"kind": "ramp"}, "--ramp-to: goes with --arrivals ramp"),
        ({"ramp_to": 3.0}, "--ramp-to: goes with --arrivals ramp"),
        ({"kind": "ramp", "ramp_to": -1.0}, "--ramp-to -1: must be above 0"),
    ],
)
def test_a_process_that_cannot_be_is_refused(fields, told):
    with pytest.raises(ConfigError, match="--") as refused:
        Arrivals(**{"kind": "poisson", "rate": 1.0, **fields})
    assert told in str(refused.value)
