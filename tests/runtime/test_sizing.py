"""What the options leave open is derived from the device: a size, or a time measured at start."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from runtime.config import STEP_BOUND_MS, SchedulerConfig, SchedulerOptions
from runtime.errors import ConfigError
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.step_time_model import MeasuredSteps, measure_steps
from runtime.simulation.cost_model import CostModel, StepTimer, StepWork
from runtime.simulation.simulator import SimulationResult, Simulator
from runtime.simulation.trace import config_from, head_event
from runtime.simulation.workloads import Workload, in_order
from runtime.sizing import describe_chunks, size_scheduler

# 128 prompt tokens in 0.1 s, and in 0.7 s: as measured on two CPUs of two cores, one with AVX512
# and bfloat16, one with AVX2 only.
FAST = CostModel(
    step_s=10.1e-3, token_s=0.72e-3, knee_tokens=8, pair_s=0.25e-6, context_s=1.2e-6, row_s=50e-6,
    sigma=0.05, tail_probability=0.005, tail_index=3.0,
)  # fmt: skip
SLOW = CostModel(
    step_s=30e-3, token_s=5.2e-3, pair_s=1.0e-6, context_s=2.3e-6, row_s=0.3e-3,
    sigma=0.05, tail_probability=0.005, tail_index=3.0,
)  # fmt: skip
MACHINES = pytest.mark.parametrize("cost", [FAST, SLOW], ids=["fast", "slow"])


def timing(cost: CostModel, seed: int = 0) -> Any:
    """A machine's step times, as `measure_steps` asks for them."""
    timer = StepTimer(cost, seed)

    def time_step(tokens: int, history: int, rows: int, row_tokens: int) -> float:
        pairs = tokens * history + tokens * (tokens + 1) // 2
        return timer.seconds(StepWork(tokens, pairs, rows, rows * (row_tokens + 1)))

    return time_step


def sized(
    options: SchedulerOptions,
    *,
    device: int | None = None,
    cost: CostModel = FAST,
    state_slots: int | None = None,
) -> SchedulerConfig:
    return size_scheduler(
        options,
        capacity_tokens=32_768,
        context_length=8192,
        eos_token_ids=frozenset(),
        device_chunk_tokens=device,
        measure=lambda bound_s: measure_steps(timing(cost), bound_s=bound_s, context_length=8192),
        state_slots=state_slots,
    )


def serve(config: SchedulerConfig, cost: CostModel, seed: int = 0) -> SimulationResult:
    """Eight streams while prompts of 1,500 tokens arrive, from the server's first step on."""
    streams = Workload(requests=32, input_tokens=(64, 64), output_tokens=(200, 400)).arrivals()
    prompts = Workload(
        requests=8, rate=0.5, input_tokens=(1500, 1500), output_tokens=(4, 4), seed=2
    ).arrivals()
    for index, prompt in enumerate(prompts):
        prompt.request_id, prompt.priority = f"long{index}", 1
        prompt.arrival_s += 1.0
    simulator = Simulator(Scheduler(config), StepTimer(cost, seed))
    return simulator.run(in_order([*streams, *prompts]))


@MACHINES
@pytest.mark.parametrize("seed", range(2))
def test_default_chunks_keep_steps_within_the_bound_on_any_machine(
    cost: CostModel, seed: int
) -> None:
    options = SchedulerOptions(max_running_requests=9)
    steps = serve(sized(options, cost=cost), cost, seed).steps
    prefill = [
        (seconds, tokens)
        for seconds, tokens in zip(steps.seconds, steps.prefill_tokens, strict=True)
        if tokens
    ]
    assert len(prefill) > 40
    within = sum(seconds <= STEP_BOUND_MS / 1e3 for seconds, _ in prefill) / len(prefill)
    assert within >= 0.95
    # And it is used: noise and whole pages keep steps below it, by no more than this.
    full = [seconds for seconds, tokens in prefill if tokens >= 8]
    assert median(full) > 0.65 * STEP_BOUND_MS / 1e3 - 16 * cost.token_s
    sizes = sorted(tokens for _, tokens in prefill)
    if cost is FAST:
        assert sizes[len(sizes) // 2] > 96
    else:
        assert sizes[-1] <= 32


@MACHINES
def test_a_size_given_rules(cost: CostModel) -> None:
    config = sized(SchedulerOptions(chunked_prefill_size=128, max_running_requests=9), cost=cost)
    assert (config.chunked_prefill_size, config.step_bound_ms) == (128, 0.0)
    assert config.measured_steps == ()
    assert max(serve(config, cost).steps.prefill_tokens) == 128


def test_a_gpu_has_a_size_by_default() -> None:
    config = sized(SchedulerOptions(), device=8192)
    assert (config.chunked_prefill_size, config.step_bound_ms) == (8192, 0.0)
    assert config.measured_steps == ()
    given = sized(SchedulerOptions(chunked_prefill_size=0), device=8192)
    assert given.chunked_prefill_size == 0


@MACHINES
def test_a_target_bounds_what_running_rows_wait_for_and_the_default_the_rest(
    cost: CostModel,
) -> None:
    options = SchedulerOptions(tpot_slo_ms=250.0, max_running_requests=9)
    config = sized(options, cost=cost)
    assert (config.tpot_slo_ms, config.step_bound_ms) == (250.0, STEP_BOUND_MS)
    steps = serve(config, cost).steps
    mixed = [
        seconds
        for seconds, tokens, rows in zip(
            steps.seconds, steps.prefill_tokens, steps.rows, strict=True
        )
        if tokens and rows >= 8
    ]
    assert sum(seconds <= 0.250 for seconds in mixed) / len(mixed) >= 0.95
    assert max(mixed) > STEP_BOUND_MS / 1e3


def test_equal_times_start_from_what_the_bound_allows() -> None:
    options = SchedulerOptions(enable_dynamic_chunking=True)
    fast, slow = sized(options), sized(options, cost=SLOW)
    assert fast.enable_dynamic_chunking
    assert fast.step_bound_ms == 0.0
    assert slow.chunked_prefill_size == 32  # two pages, the least there is
    assert 100 < fast.chunked_prefill_size < 250


def test_what_does_not_fit_what_was_derived_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"truncation_align_size 16384: .* \(8192\)"):
        sized(SchedulerOptions(truncation_align_size=16384), device=8192)


def test_a_recorded_configuration_is_the_same_when_read() -> None:
    config = sized(SchedulerOptions())
    assert config.measured_steps
    assert config_from(head_event(config)["options"]) == config


@pytest.mark.parametrize(
    ("options", "device", "said"),
    [
        ({}, None, "a step takes 150 ms at most"),
        ({}, 8192, "chunks of 8192 tokens"),
        ({"chunked_prefill_size": 64}, None, "chunks of 64 tokens"),
        ({"chunked_prefill_size": -1}, None, "never cut"),
        ({"tpot_slo_ms": 40.0}, None, "a step takes 40 ms while requests run"),
    ],
)
def test_how_prompts_are_cut_is_said(
    options: dict[str, Any], device: int | None, said: str
) -> None:
    assert said in describe_chunks(sized(SchedulerOptions(**options), device=device))


class TestMeasurement:
    def test_it_ends_when_the_bound_is_in_sight(self) -> None:
        steps = measure_steps(timing(FAST), bound_s=0.15, context_length=8192)
        assert max(seconds for *_, seconds in steps) < 0.15
        assert len(steps) <= 16

    @pytest.mark.parametrize("factor", [20, 200])
    def test_it_ends_on_a_machine_that_is_too_slow_for_it(self, factor: int) -> None:
        times: list[float] = []

        def slow(*shape: int) -> float:
            times.append(factor * timing(SLOW)(*shape))
            return times[-1]

        steps = measure_steps(slow, bound_s=0.15, context_length=8192)
        assert 1 <= len(steps) < 10
        assert sum(times[1:-1]) <= 2.0

    @pytest.mark.parametrize("context_length", [16, 1000, 1024, 2048, 4096])
    def test_no_step_is_longer_than_a_sequence(self, context_length: int) -> None:
        ends: list[int] = []

        def timed(tokens: int, history: int, rows: int, row_tokens: int) -> float:
            ends.extend([tokens + history, (row_tokens + 1) * (rows > 0)])
            return 1e-6

        steps: MeasuredSteps = measure_steps(timed, bound_s=0.15, context_length=context_length)
        assert max(ends, default=0) <= context_length
        assert bool(steps) == (context_length >= 1024)


def test_a_recurrent_model_has_the_state_slots_of_its_device() -> None:
    options = SchedulerOptions(state_slots=7, state_interval=64)
    plain, recurrent = sized(options, device=64), sized(options, device=64, state_slots=5)
    assert (plain.recurrent, plain.state_slots) == (False, 0)
    assert (recurrent.recurrent, recurrent.state_slots) == (True, 5)
    assert recurrent.state_interval == 64
