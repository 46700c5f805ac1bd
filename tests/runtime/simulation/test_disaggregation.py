"""Two devices that share a load, with times that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from runtime.simulation.cost_model import CostModel
from runtime.simulation.disaggregation import LAYOUTS, Layout, Link, Load, Slo, goodput
from runtime.simulation.machines import Machine
from runtime.simulation.simulator import HostCost

# A step takes 10 ms, and 1 ms more for each token of a prompt or a decode row; there is no noise.
STEP_S, TOKEN_S = 0.010, 0.001
MACHINE = Machine(
    CostModel(step_s=STEP_S, token_s=TOKEN_S),
    HostCost(),
    {"capacity_tokens": 64_000, "context_length": 8192, "chunked_prefill_size": 2048},
)
LINK = Link(bytes_per_s=1e6, latency_s=0.005, token_bytes=1000)  # 1 ms a token
FAST = Link(bytes_per_s=1e12, latency_s=0.0, token_bytes=1)
LOAD = Load("", 40, 5.0, (100, 100), (20, 20), Slo(1.0, 0.020))
DISAGGREGATED = next(layout for layout in LAYOUTS if layout.disaggregated)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_request_gets_all_its_tokens(layout):
    seen = layout.run(LOAD, 5.0, MACHINE, LINK)
    assert sorted(stats.request_id for stats in seen) == sorted(f"r{n}" for n in range(40))
    assert {stats.tokens for stats in seen} == {20}
    assert all(stats.retractions == 0 for stats in seen)


def test_a_request_alone_waits_for_its_keys_and_values_and_nothing_else():
    (alone,) = DISAGGREGATED.run(replace(LOAD, requests=1), 1.0, MACHINE, LINK)
    assert alone.ttft_s == pytest.approx(STEP_S + 100 * TOKEN_S)
    crossing_s = 100 * 0.001 + 0.005
    assert alone.longest_gap_s == pytest.approx(crossing_s + STEP_S)
    rest_s = alone.last_s - alone.first_s - alone.longest_gap_s
    assert rest_s == pytest.approx(18 * (STEP_S + TOKEN_S))


def test_prompts_cross_the_link_one_after_the_other():
    at_once = DISAGGREGATED.run(replace(LOAD, requests=4), 0.0, MACHINE, LINK)
    seconds = sorted(stats.longest_gap_s for stats in at_once)
    gaps = [later - sooner for sooner, later in pairwise(seconds)]
    # All prompts are computed in one step; each then waits for those before it.
    assert min(gaps) >= 0.1 - 2 * STEP_S


def test_prompts_of_others_hold_up_no_token_where_they_are_computed_elsewhere():
    def longest_gap(layout: Layout) -> float:
        return max(stats.longest_gap_s for stats in layout.run(LOAD, 5.0, MACHINE, FAST))

    # A step has at most a row for each request; in the other layouts it may have a prompt of 100.
    assert longest_gap(DISAGGREGATED) < 2 * (STEP_S + 8 * TOKEN_S)
    assert longest_gap(LAYOUTS[0]) > STEP_S + 100 * TOKEN_S


def test_goodput_is_where_the_slo_begins_to_break():
    rate = goodput(LOAD, DISAGGREGATED, MACHINE, FAST)

    def share(rate: float) -> float:
        seen = DISAGGREGATED.run(LOAD, rate, MACHINE, FAST)
        return sum(map(LOAD.slo.met, seen)) / len(seen)

    assert share(rate) >= 0.9 > share(1.05 * rate)
