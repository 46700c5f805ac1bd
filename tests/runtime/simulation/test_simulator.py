"""The simulator keeps time, is deterministic, and serves every request."""

from __future__ import annotations

import statistics
from array import array
from typing import TYPE_CHECKING, Any

import pytest

from runtime.config import SchedulerConfig
from runtime.request import FinishReason
from runtime.scheduling.policies import POLICIES
from runtime.scheduling.scheduler import Scheduler
from runtime.simulation.cost_model import CostModel, StepTimer
from runtime.simulation.machines import Machine, machine
from runtime.simulation.report import summarize
from runtime.simulation.scenario import simulate
from runtime.simulation.simulator import HostCost, SimulationResult, Simulator
from runtime.simulation.workloads import Arrival, Workload
from tests.values import present

if TYPE_CHECKING:
    from runtime.request import RequestOutput
    from runtime.runner import StepOutput
    from runtime.scheduling.plan import Plan
    from runtime.scheduling.schedule_batch import ScheduleBatch

EXACT = CostModel(step_s=0.010, token_s=0.001, knee_tokens=1.0)


def tiny(host: HostCost | None = None, **options: Any) -> Machine:
    given = {"capacity_tokens": 65_536, "context_length": 4096, "chunked_prefill_size": 64}
    return Machine(EXACT, host or HostCost(), {**given, **options})


class CheckedScheduler(Scheduler):
    """Recounts its books after every call."""

    def plan(self, now: float) -> Plan:
        plan = super().plan(now)
        self.check()
        return plan

    def commit(self, batch: ScheduleBatch, output: StepOutput, now: float) -> list[RequestOutput]:
        outputs = super().commit(batch, output, now)
        self.check()
        return outputs


def checked(options: dict[str, Any], arrivals: list[Arrival]) -> SimulationResult:
    config = SchedulerConfig(**options)
    return Simulator(CheckedScheduler(config), StepTimer(EXACT, 1)).run(arrivals)


def arrival(at: float, inputs: int, outputs: int, **fields: Any) -> Arrival:
    return Arrival(at, array("i", range(inputs)), outputs, outputs, f"r{at}-{inputs}", **fields)


def test_lone_request_takes_exactly_its_steps() -> None:
    result = simulate(tiny(), [arrival(2.0, 50, 5)])
    stats = result.requests[0]
    assert stats.ttft_s == pytest.approx(0.010 + 0.049)  # 49 tokens beyond the first
    assert stats.tpot_s == pytest.approx(0.010)
    assert result.elapsed_s == pytest.approx(0.059 + 4 * 0.010)
    assert result.steps.kinds == ["prefill", "decode", "decode", "decode", "decode"]
    assert (stats.tokens, present(stats.finish).reason) == (5, FinishReason.LENGTH)


def test_device_is_never_in_two_steps_at_once_and_loses_no_time() -> None:
    result = simulate(
        tiny(), Workload(requests=60, input_tokens=(20, 200), output_tokens=(2, 40)).arrivals()
    )
    # All requests are there at the start and the host costs nothing: no gap between steps.
    assert result.busy_s == pytest.approx(sum(result.steps.seconds))
    assert result.elapsed_s == pytest.approx(result.busy_s)


def test_tokens_computed_are_the_tokens_asked_for() -> None:
    made = Workload(
        requests=40, rate=20.0, input_tokens=(20, 300), output_tokens=(2, 60)
    ).arrivals()
    result = simulate(tiny(disable_radix_cache=True), made)
    assert sum(result.steps.prefill_tokens) == sum(len(a.input_ids) for a in made)
    assert [r.tokens for r in result.requests] == [a.output_tokens for a in made]
    assert len(result.gaps_s) == sum(a.output_tokens - 1 for a in made)


def test_overlap_hides_the_host_behind_the_device() -> None:
    host = HostCost(step_s=0.004)
    made = [arrival(0.0, 30, 50)]
    hidden = simulate(tiny(host), made)
    synchronous = simulate(tiny(host), made, overlap=False)
    assert hidden.elapsed_s == pytest.approx(0.004 + 0.039 + 49 * 0.010)
    assert synchronous.elapsed_s == pytest.approx(0.039 + 49 * 0.010 + 50 * 0.004)


def test_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    made = Workload(requests=80, rate=30.0, max_new_factor=2.0).arrivals()
    where = machine("h200-llama-8b")
    runs = [simulate(where, made, seed=seed) for seed in (1, 1, 2)]
    assert runs[0].requests == runs[1].requests
    assert runs[0].steps == runs[1].steps
    assert runs[0].requests != runs[2].requests


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.sampled(4)
def test_every_request_ends_with_the_books_right(policy: str, page_size: int) -> None:
    made = Workload(
        requests=50, rate=60.0, input_tokens=(5, 60), output_tokens=(30, 60), prefix_groups=4,
        prefix_tokens=64, cold_share=0.3, max_new_factor=1.2, seed=3,
    ).arrivals()  # fmt: skip
    made[10].abort_after_s = 0.05
    options = {
        "capacity_tokens": 800, "context_length": 512, "page_size": page_size,
        "chunked_prefill_size": 48, "schedule_policy": policy, "schedule_conservativeness": 0.1,
    }  # fmt: skip
    result = checked(options, made)
    ends = [r.finish.reason if r.finish else None for r in result.requests]
    assert set(ends) <= {FinishReason.STOP, FinishReason.ABORT}
    for stats, wanted in zip(result.requests, made, strict=True):
        if present(stats.finish).reason is FinishReason.STOP:
            assert stats.tokens == wanted.output_tokens
    after = result.statistics
    assert (after.running, after.waiting, after.in_flight) == (0, 0, 0)
    assert after.private_tokens == 0
    assert after.counters.retractions > 0


def test_client_that_leaves_is_aborted_at_its_time() -> None:
    result = simulate(tiny(), [arrival(0.0, 10, 1000, abort_after_s=0.5)])
    stats = result.requests[0]
    assert present(stats.finish).reason is FinishReason.ABORT
    assert stats.last_s == pytest.approx(0.5, abs=0.03)


def test_scripted_tokens_reach_the_cache() -> None:
    first = arrival(0.0, 64, 32, output_ids=array("i", range(900, 932)))
    follow_up = Arrival(5.0, array("i", [*range(64), *range(900, 931), 5, 6]), 4, 4, "again")
    result = simulate(tiny(page_size=1), [first, follow_up])
    assert result.requests[1].cached_tokens == 64 + 31


@pytest.mark.parametrize("token_id", [2, 65_536, 151_645, 262_143])
def test_no_recorded_token_ends_a_request_before_its_time(token_id: int) -> None:
    said = arrival(0.0, 64, 32, output_ids=array("i", [token_id] * 32))
    assert simulate(tiny(), [said]).requests[0].tokens == 32


def test_request_that_never_fits_is_refused_not_stuck() -> None:
    result = simulate(tiny(capacity_tokens=1024), [arrival(0.0, 2000, 4), arrival(0.1, 20, 4)])
    assert list(result.refused) == ["r0.0-2000"]
    assert [r.request_id for r in result.requests] == ["r0.1-20"]


def test_static_batches_do_not_overlap() -> None:
    made = [arrival(0.0, 10, 100), *(arrival(0.001 * i, 10 + i, 5) for i in range(1, 4))]
    static = simulate(tiny(), made, static_batching=True)
    longest = static.requests[0].last_s
    assert all(r.first_s > longest for r in static.requests[1:])
    continuous = simulate(tiny(), made)
    assert all(r.last_s < continuous.requests[0].last_s for r in continuous.requests[1:])


def test_summary_is_recounted_from_the_requests() -> None:
    made = Workload(requests=30, rate=50.0, input_tokens=(10, 50), output_tokens=(2, 30)).arrivals()
    result = simulate(tiny(), made)
    summary = summarize(result)
    assert (summary.requests, summary.failed, summary.refused) == (30, 0, 0)
    tokens = sum(a.output_tokens for a in made)
    assert summary.output_tokens_per_s == pytest.approx(tokens / result.elapsed_s)
    ttfts = sorted(r.ttft_s for r in result.requests)
    assert (summary.ttft.p50, summary.ttft.max) == (statistics.median(ttfts), ttfts[-1])
