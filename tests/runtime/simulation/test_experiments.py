"""What the README says of each mechanism, held against the runs it is taken from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from runtime.simulation.experiments import EXPERIMENTS, MACHINE, TARGET_MS, TIGHT_MS
from runtime.simulation.machines import machine
from runtime.simulation.report import Summary, share_within, summarize
from runtime.simulation.scenario import simulate

if TYPE_CHECKING:
    from runtime.simulation.simulator import SimulationResult

pytestmark = pytest.mark.slow
Runs = dict[str, tuple["SimulationResult", Summary]]


def runs_of(title: str) -> Runs:
    experiment = next(e for e in EXPERIMENTS if e.title.startswith(title))
    arrivals = experiment.arrivals()
    runs: Runs = {}
    for variant in experiment.variants:
        result = simulate(
            machine(MACHINE), arrivals, variant.options, static_batching=variant.static_batching
        )
        assert len(result.requests) == len(arrivals)
        runs[variant.name] = (result, summarize(result))
    return runs


def test_continuous_batching_keeps_the_places_full() -> None:
    runs = runs_of("Static")
    rows = {name: sum(r.steps.rows) / len(r.steps.rows) for name, (r, _) in runs.items()}
    assert rows["static"] < 0.7 * rows["continuous"]
    assert runs["continuous"][1].output_tokens_per_s > 1.3 * runs["static"][1].output_tokens_per_s


def test_chunks_bound_the_gap() -> None:
    gaps = {name: summary.itl.max for name, (_, summary) in runs_of("Whole").items()}
    assert gaps["chunks of 1024"] < gaps["chunks of 8192"] / 2 < gaps["whole"] / 4


def test_mixed_gaps_are_bounded_by_the_longest_step_and_strict_ones_are_not() -> None:
    runs = runs_of("Strict")
    for result, _ in runs.values():
        assert result.statistics.counters.retractions == 0
    mixed, strict = runs["mixed"][0], runs["strict"][0]
    # A gap spans the step itself and what the host adds beside it.
    assert max(mixed.gaps_s) <= max(mixed.steps.seconds) + 0.005
    assert max(strict.gaps_s) > 10 * max(mixed.gaps_s)


def test_slo_chunks_hold_their_target_at_no_worse_throughput_than_fixed_ones() -> None:
    runs = runs_of("Fixed")
    assert share_within(runs["SLO"][0], TARGET_MS / 1e3) >= 0.95
    assert share_within(runs[f"SLO of {TIGHT_MS:.0f} ms"][0], TIGHT_MS / 1e3) >= 0.95
    assert share_within(runs["8192"][0], TARGET_MS / 1e3) < 0.2
    fixed_within = runs["256"]  # the fixed size that holds the target
    assert share_within(fixed_within[0], TARGET_MS / 1e3) >= 0.95
    assert runs["SLO"][1].total_tokens_per_s > 1.05 * fixed_within[1].total_tokens_per_s


def test_policies_trade_mean_against_tail() -> None:
    runs = runs_of("Policies")
    mean = {name: summary.ttft.mean for name, (_, summary) in runs.items()}
    p99 = {name: summary.ttft.p99 for name, (_, summary) in runs.items()}
    cold = {
        name: max(r.ttft_s for r in result.requests if r.input_tokens < 1000)
        for name, (result, _) in runs.items()
    }
    assert mean["lpm, no age bound"] < mean["lpm"] < mean["hrrn"] < mean["fcfs"] / 2
    assert p99["lpm"] < p99["lpm, no age bound"] < p99["fcfs"]
    assert cold["hrrn"] < cold["lpm"] < cold["lpm, no age bound"]
