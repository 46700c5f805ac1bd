"""The cost model's arithmetic, its noise, and its fit."""

from __future__ import annotations

import random
from array import array
from statistics import median

import pytest

from runtime.errors import ConfigError, LoomserveError
from runtime.scheduling.schedule_batch import ScheduleBatch
from runtime.simulation.cost_fit import StepTime, fit_cost_model
from runtime.simulation.cost_model import CostModel, StepTimer, StepWork
from runtime.simulation.least_squares import fit_nonnegative
from runtime.simulation.machines import MACHINE_NAMES, machine

TRUE = CostModel(
    step_s=12e-3, token_s=0.5e-3, knee_tokens=16.0, pair_s=0.3e-6, context_s=1.5e-6, row_s=60e-6
)


def random_shapes(count: int, seed: int) -> list[StepWork]:
    """Decode, prefill and mixed steps as a small server sees them."""
    rng = random.Random(seed)
    shapes = []
    for _ in range(count):
        kind = rng.choice(("decode", "prefill", "mixed"))
        tokens = 0 if kind == "decode" else rng.randint(1, 512)
        history = rng.randint(0, 4096)
        rows = 0 if kind == "prefill" else rng.randint(1, 32)
        pairs = tokens * history + tokens * (tokens + 1) // 2
        shapes.append(StepWork(tokens, pairs, rows, rows * rng.randint(50, 2000)))
    return shapes


def naive_pairs(start: int, length: int) -> int:
    return sum(start + i + 1 for i in range(length))


def test_shape_counts_what_each_row_attends_to() -> None:
    batch = ScheduleBatch(step=0, num_prefill=2)
    batch.rows = array("i", [1, 2, 3, 4])
    batch.prefix_lens = array("i", [0, 100, 7, 50])
    batch.extend_lens = array("i", [10, 3, 1, 1])
    shape = StepWork.of(batch)
    assert shape == StepWork(13, naive_pairs(0, 10) + naive_pairs(100, 3), 2, 8 + 51)


def test_few_tokens_cost_one_pass_over_the_weights() -> None:
    one = TRUE.seconds(StepWork(prefill_tokens=1))
    assert one == TRUE.seconds(StepWork(prefill_tokens=16))
    assert TRUE.seconds(StepWork(prefill_tokens=17)) == pytest.approx(one + TRUE.token_s)


def test_noise_is_seeded_and_has_the_stated_spread_and_tail() -> None:
    noisy = CostModel(step_s=1.0, token_s=0.0, sigma=0.05, tail_probability=0.02, tail_index=2.0)
    shape = StepWork(decode_rows=1)
    timer, again = StepTimer(noisy, seed=3), StepTimer(noisy, seed=3)
    drawn = [timer.seconds(shape) for _ in range(20_000)]
    assert drawn == [again.seconds(shape) for _ in range(20_000)]
    assert median(drawn) == pytest.approx(1.0, rel=0.01)
    within = sum(0.95 <= s <= 1.05 for s in drawn) / len(drawn)
    assert within == pytest.approx(0.68, abs=0.02)  # one standard deviation
    # A Pareto factor of index 2 exceeds 2 with probability 2 ** -2.
    beyond = sum(s > 2.0 for s in drawn) / len(drawn)
    assert beyond == pytest.approx(0.02 / 4, rel=0.25)


def test_times_are_whole_nanoseconds() -> None:
    model = CostModel(step_s=0.01, token_s=1e-4, sigma=0.05, tail_probability=0.5)
    timer = StepTimer(model, seed=3)
    times = [timer.seconds(StepWork(prefill_tokens=7)) for _ in range(50)]
    assert all(seconds == round(seconds, 9) for seconds in times)
    assert len(set(times)) > 40


def test_fit_recovers_exact_parameters() -> None:
    times = [StepTime(shape, TRUE.seconds(shape)) for shape in random_shapes(400, seed=1)]
    fit = fit_cost_model(times)
    for name in ("step_s", "token_s", "knee_tokens", "pair_s", "context_s", "row_s"):
        assert getattr(fit.model, name) == pytest.approx(getattr(TRUE, name), rel=1e-5), name
    assert fit.error < 1e-6
    assert fit.outliers == 0


def test_fit_recovers_parameters_under_heavy_tailed_noise() -> None:
    noisy = CostModel(
        TRUE.step_s, TRUE.token_s, TRUE.knee_tokens, TRUE.pair_s, TRUE.context_s, TRUE.row_s,
        sigma=0.05, tail_probability=0.05, tail_index=1.5,
    )  # fmt: skip
    timer = StepTimer(noisy, seed=5)
    times = [StepTime(shape, timer.seconds(shape)) for shape in random_shapes(1500, seed=2)]
    fit = fit_cost_model(times)
    probes = random_shapes(200, seed=9)
    errors = [abs(fit.model.seconds(p) / TRUE.seconds(p) - 1) for p in probes]
    assert median(errors) < 0.02
    assert max(errors) < 0.10
    assert fit.model.sigma == pytest.approx(0.05, abs=0.02)
    assert 0.02 < fit.model.tail_probability < 0.10
    assert fit.model.tail_index == pytest.approx(1.5, abs=0.5)


def test_fit_does_without_features_that_never_occur() -> None:
    shapes = [StepWork(decode_rows=n % 8 + 1, context_tokens=100 * n) for n in range(64)]
    fit = fit_cost_model([StepTime(shape, TRUE.seconds(shape)) for shape in shapes])
    assert fit.model.pair_s == 0.0
    assert fit.model.seconds(shapes[5]) == pytest.approx(TRUE.seconds(shapes[5]), rel=1e-6)


def test_fit_refuses_too_few_steps() -> None:
    times = [StepTime(StepWork(decode_rows=1), 0.01)] * 15
    with pytest.raises(LoomserveError, match="at least 16 measured steps, 15 given"):
        fit_cost_model(times)


def test_coefficients_never_come_out_negative() -> None:
    # The best line through these has slope -1; without negative ones, the mean is best.
    features = [(1.0, 0.0), (1.0, 1.0), (1.0, 2.0)]
    assert fit_nonnegative(features, [3.0, 2.0, 1.0], [1.0] * 3) == pytest.approx([2.0, 0.0])


@pytest.mark.parametrize("name", MACHINE_NAMES)
def test_machines_respect_their_floors(name: str) -> None:
    # What the weights' bytes and the matmul rate alone would take, from public model sizes.
    floors = {
        "h200-llama-8b": (2 * 7.5e9 / 4.8e12, 2 * 6.98e9 / 989e12),
        "cpu-smollm2-135m": (269e6 / 31e9, 212e6 / 0.42e12),
    }
    cost, (step_s, token_s) = machine(name).cost, floors[name]
    assert step_s < cost.step_s < 2 * step_s
    assert 0.95 * token_s < cost.token_s < 2 * token_s


def test_unknown_machine_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="h200-llama-8b"):
        machine("abacus")
