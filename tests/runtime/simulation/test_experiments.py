"""What docs/performance.md says of each mechanism, held against the runs it is taken from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from runtime.scheduling.scheduler import Scheduler
from runtime.simulation.cost_model import StepTimer, StepWork
from runtime.simulation.experiments import (
    EXPERIMENTS,
    MACHINE,
    TARGET_MS,
    TIGHT_MS,
    conversations,
)
from runtime.simulation.machines import machine
from runtime.simulation.report import Summary, share_within, summarize
from runtime.simulation.scenario import simulate
from runtime.simulation.simulator import Simulator
from runtime.simulation.trace import config_from
from runtime.simulation.workloads import Workload, in_order

if TYPE_CHECKING:
    from runtime.request import RequestOutput
    from runtime.runner import StepOutput
    from runtime.scheduling.schedule_batch import ScheduleBatch
    from runtime.simulation.simulator import SimulationResult
    from runtime.simulation.workloads import Arrival

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


def test_short_prompts_do_not_wait_for_long_ones_which_end_a_third_later_at_most() -> None:
    runs = runs_of("Short prompts")
    short, long = {}, {}
    for name, (result, _) in runs.items():
        assert result.statistics.counters.retractions == 0
        short[name] = max(r.ttft_s for r in result.requests if r.input_tokens < 1000)
        long[name] = max(r.ttft_s for r in result.requests if r.input_tokens >= 1000)
        longest_step_s = max(result.steps.seconds)
    assert short["a share of 0.25"] < 6 * longest_step_s
    assert short["in turn"] > 20 * short["a share of 0.25"]
    assert long["a share of 0.25"] < 4 / 3 * long["in turn"]


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


def test_a_tier_that_holds_all_conversations_leaves_little_to_compute_again() -> None:
    runs = runs_of("A tier")
    computed = {name: sum(result.steps.prefill_tokens) for name, (result, _) in runs.items()}
    new = len({tuple(a.input_ids[:4000]) for a in conversations()}) * 4000
    asked = {a.request_id: len(a.input_ids) for a in conversations()}
    for name, tokens in asked.items():
        conversation, turn = name.split(".")
        before = f"{conversation}.{int(turn) - 1}"
        new += tokens - 4000 if turn == "0" else tokens - asked[before]
    # Nothing less than what no request had before can do; answers were computed as outputs.
    all_of_them = "host memory, 128 GiB"
    assert computed[all_of_them] < 1.1 * new
    assert computed[all_of_them] < computed["host memory, 32 GiB"] < computed["none"]
    assert computed["none"] > 4 * new
    p50 = {name: summary.ttft.p50 for name, (_, summary) in runs.items()}
    assert p50[all_of_them] < p50["none"] / 2
    loads = runs[all_of_them][0].statistics.counters
    assert loads.failed_loads == loads.failed_copies == 0


class Watched(Scheduler):
    """Notes after every mixed step whether the latency target is said to be within reach."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(config_from(options))
        self.said: list[bool | None] = []

    def commit(self, batch: ScheduleBatch, output: StepOutput, now: float) -> list[RequestOutput]:
        outputs = super().commit(batch, output, now)
        if batch.kind == "mixed":
            self.said.append(self.slo_feasible)
        return outputs


def streams_and_long_prompts() -> list[Arrival]:
    """Eight streams that go on, and a 1,500-token prompt now and then."""
    streams = Workload(requests=48, input_tokens=(64, 64), output_tokens=(200, 400)).arrivals()
    prompts = Workload(
        requests=8, rate=0.2, input_tokens=(1500, 1500), output_tokens=(4, 4), seed=2
    ).arrivals()
    for index, prompt in enumerate(prompts):
        # Ahead of the streams that wait for a place, as if they had not come yet.
        prompt.request_id, prompt.priority = f"long{index}", 1
        prompt.arrival_s += 2.0
    return in_order([*streams, *prompts])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("factor", [2.0, 1.1])
def test_target_from_the_decode_step_on_a_cpu(factor: float, seed: int) -> None:
    where = machine("cpu-smollm2-135m")
    decode_s = where.cost.seconds(StepWork(decode_rows=8, context_tokens=8 * 250))
    target_s = factor * decode_s
    options = {**where.options, "max_running_requests": 9, "tpot_slo_ms": 1e3 * target_s}
    scheduler = Watched(options)
    result = Simulator(scheduler, StepTimer(where.cost, seed), host=where.host).run(
        streams_and_long_prompts()
    )
    assert len(scheduler.said) > 4 * 1500 / 128
    if factor == 2.0:
        assert share_within(result, target_s) >= 0.95
        assert False not in scheduler.said
    else:
        assert scheduler.said.count(False) > 0.8 * len(scheduler.said)
