"""Chunk sizes: the dynamic size against worked examples, the target size on a noisy device."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from runtime.runner import StepOutput
from runtime.scheduling.chunk_sizer import (
    ChunkLoad,
    ChunkSizer,
    DynamicChunkSizer,
    StaticChunkSizer,
    TimedChunkSizer,
    make_chunk_sizer,
    predict_next_chunk_size,
)
from runtime.scheduling.least_squares import solve
from runtime.scheduling.schedule_batch import ScheduleBatch
from runtime.scheduling.step_time_model import StepFeatures, StepTimeModel, quantile
from tests.runtime.scheduling.scheduler_harness import Driver, config, request

PAGE = 16


@pytest.mark.parametrize(("history", "expected"), [(0, 512), (4096, 384), (16384, 256)])
def test_chunks_shrink_as_the_history_grows(history: int, expected: int) -> None:
    assert predict_next_chunk_size(history, 2e-5, 0.5, 512, PAGE) == expected


def test_a_chunk_is_never_below_a_quarter_of_the_base() -> None:
    assert predict_next_chunk_size(10_000_000, 2e-5, 0.5, 512, PAGE) == 128


@pytest.mark.parametrize("base", [32, 48, 100])
def test_a_chunk_is_never_above_its_base(base: int) -> None:
    sizes = {predict_next_chunk_size(h, 2e-5, 0.5, base, PAGE) for h in range(0, 40_000, 500)}
    assert max(sizes) <= base
    assert min(sizes) >= base / 4


def test_chunks_of_one_prompt_take_about_the_same_time() -> None:
    a, b, history, times = 2e-5, 0.5, 0, []
    while history < 20_000:
        size = predict_next_chunk_size(history, a, b, 4096, PAGE)
        times.append(a * (size * size + 2 * size * history) + b * size)
        history += size
    static = a * (4096 * 4096 + 2 * 4096 * 16384) + b * 4096
    assert max(times) < 1.35 * min(times) < static


def step(tokens: int, history: int, rows: int, context: int) -> ScheduleBatch:
    """A step of one chunk beside decode rows with this many context tokens in all."""
    batch = ScheduleBatch(0)
    if tokens:
        batch.num_prefill = 1
        batch.requests.append(request("p", 1))
        batch.prefix_lens.append(history)
        batch.extend_lens.append(tokens)
        batch.input_ids.extend(range(tokens))
    for row in range(rows):
        batch.requests.append(request(f"d{row}", 1))
        batch.prefix_lens.append(context // rows - 1)
        batch.extend_lens.append(1)
    batch.rows = array("i", range(1, len(batch.requests) + 1))
    return batch


class Device:
    """Step times like a CPU's: memory-bound up to some rows, then linear, with noise and rare
    outliers."""

    def __init__(self, seed: int, noise: float = 0.04, floor_s: float = 0.010) -> None:
        self.random = random.Random(seed)
        self.noise = noise
        self.floor_s = floor_s

    def seconds(self, tokens: int, history: int, rows: int, context: int) -> float:
        compute = 0.00065 * (tokens + rows)
        attention = 1e-7 * (tokens * (history + tokens / 2) + context)
        value = max(self.floor_s, compute + 0.002) + attention
        if self.random.random() < 0.01:
            value *= 1.5
        return value * (1 + self.random.gauss(0, self.noise))


def serve(
    sizer: ChunkSizer, device: Device, prompts: int, rows: int = 8, length: int = 1500
) -> list[float]:
    """Times of the mixed steps while prompts arrive beside decoding rows."""
    times: list[float] = []
    context = 200 * rows
    for _ in range(prompts):
        for _ in range(10):
            sizer.observe(step(0, 0, rows, context), device.seconds(0, 0, rows, context))
        history = 0
        while history < length:
            size = sizer.choose(ChunkLoad(history, rows, context))
            assert size.exact
            assert size.tokens is not None
            tokens = min(size.tokens, length - history)
            times.append(device.seconds(tokens, history, rows, context))
            sizer.observe(step(tokens, history, rows, context), times[-1])
            history += tokens
            context += rows
        context = 200 * rows
    return times


def slo_config(target_ms: float) -> Any:
    return config(
        page_size=PAGE, capacity_tokens=32768, chunked_prefill_size=128, tpot_slo_ms=target_ms
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.02, 0.08], ids=["quiet machine", "noisy machine"])
@pytest.mark.sampled(2)
def test_mixed_steps_stay_within_a_feasible_target(seed: int, noise: float) -> None:
    # Decode alone takes 10 ms; the smallest chunk, 24 rows together, about 17.8.
    sizer = TimedChunkSizer(slo_config(24.0))
    times = serve(sizer, Device(seed, noise), prompts=12)
    within = sum(t <= 0.024 for t in times) / len(times)
    assert within >= 0.95
    assert sizer.feasible


def test_a_target_is_used_not_only_kept() -> None:
    sizer = TimedChunkSizer(slo_config(60.0))
    times = serve(sizer, Device(1, 0.02), prompts=12)
    assert len(times) / 12 < 1500 / 48, "chunks stay far below what the target allows"
    assert sum(t <= 0.060 for t in times) / len(times) >= 0.95


def test_an_infeasible_target_is_reported() -> None:
    sizer = TimedChunkSizer(slo_config(11.0))
    serve(sizer, Device(1), prompts=4)
    assert sizer.feasible is False
    assert sizer.choose(ChunkLoad(0, 8, 1600)).tokens == PAGE, "prefill goes on all the same"


@pytest.mark.parametrize(("target_ms", "feasible"), [(24.0, True), (11.0, False)])
@pytest.mark.sampled(1)
def test_the_scheduler_learns_from_what_steps_took(target_ms: float, feasible: bool) -> None:
    """Eight streams while prompts arrive one after the other; times come in with the results."""
    driver = Driver(
        config(
            page_size=PAGE,
            capacity_tokens=32768,
            chunked_prefill_size=128,
            max_running_requests=16,
            tpot_slo_ms=target_ms,
        ),
        checked=False,
    )
    device, inner, times = Device(3, 0.02), driver.device.run, []

    def run(batch: ScheduleBatch) -> StepOutput:
        output = inner(batch)
        rows = batch.num_decode
        context = sum(batch.prefix_lens[batch.num_prefill :]) + rows
        history = batch.prefix_lens[0] if batch.num_prefill else 0
        output.device_s = device.seconds(batch.prefill_tokens, history, rows, context)
        if batch.kind == "mixed":
            times.append(output.device_s)
        return output

    driver.device.run = run
    assert driver.scheduler.statistics().slo_feasible is None
    driver.add(*[request(f"stream{i}", 64, 2000) for i in range(8)])
    for turn in range(700):
        if turn % 60 == 20:
            driver.add(request(f"prompt{turn}", 500, 1))
        driver.step()
    stats = driver.scheduler.statistics()
    assert stats.slo_feasible is feasible
    assert stats.predicted_step_s is not None
    within = sum(t <= target_ms / 1000 for t in times) / len(times)
    assert (within >= 0.95) is feasible


class ArithmeticBound:
    """Step times of two AVX2 cores, as recorded: every row costs arithmetic from the first on, so
    8 decode rows alone take 80 ms, with 8 tokens of a prompt 119 to 154 ms (5 and 95 %), and with
    the page that a prompt must begin with 180 ms."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def seconds(self, tokens: int, history: int, rows: int, context: int) -> float:
        linear = 0.0309 + 0.0062 * (tokens + rows)
        attention = 1e-6 * tokens * (history + tokens / 2) + 2e-6 * context
        return (linear + attention) * (1 + self.random.gauss(0, 0.04))


def answers_on(
    device: ArithmeticBound, sizer: TimedChunkSizer, target_s: float
) -> tuple[list[bool | None], float]:
    """What the sizer said after each mixed step, and the share of them within the target, while
    long prompts come and short ones between them, all beside eight decoding rows."""
    rows, context = 8, 8 * 150
    said: list[bool | None] = []
    within = 0
    for length in [64, 64, 64, 600] + 4 * [64, 64, 64, 64, 64, 64, 1500]:
        for _ in range(5):
            sizer.observe(step(0, 0, rows, context), device.seconds(0, 0, rows, context))
        history = 0
        while history < length:
            size = sizer.choose(ChunkLoad(history, rows, context)).tokens
            assert size is not None
            tokens = min(size, length - history)
            seconds = device.seconds(tokens, history, rows, context)
            sizer.observe(step(tokens, history, rows, context), seconds)
            within += seconds <= target_s
            said.append(sizer.feasible)
            history += tokens
    return said, within / len(said)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("target_s", [0.161, 0.140, 0.125])
@pytest.mark.sampled(2)
def test_a_held_target_is_said_to_be_feasible_though_every_prompt_begins_beyond_it(
    target_s: float, seed: int
) -> None:
    sizer = TimedChunkSizer(slo_config(1e3 * target_s))
    said, within = answers_on(ArithmeticBound(seed), sizer, target_s)
    assert within >= 0.95
    known = said[said.index(True) :]
    assert set(said[: -len(known)]) == {None}
    assert set(known) == {True}


def test_what_no_step_can_hold_where_arithmetic_bounds_it_is_said_once() -> None:
    sizer = TimedChunkSizer(slo_config(88.0))  # 1.1 decode steps
    said, within = answers_on(ArithmeticBound(0), sizer, 0.088)
    assert within == 0.0
    assert set(said[said.index(False) :]) == {False}


def test_feasibility_is_unknown_before_steps_were_measured() -> None:
    assert TimedChunkSizer(slo_config(20.0)).feasible is None


@pytest.mark.parametrize("history", [0, 1000, 4000])
def test_the_predicted_time_of_a_step_is_that_of_its_tokens_behind_their_history(
    history: int,
) -> None:
    def seconds(tokens: int, before: int, rows: int, context: int) -> float:
        square = tokens * (tokens + 2 * before)
        return 3e-8 * square + 5e-5 * tokens + 1e-4 * rows + 1e-8 * context + 0.004

    sizer = TimedChunkSizer(slo_config(20.0))
    rng = random.Random(5)
    for _ in range(60):
        shape = rng.randint(1, 128), rng.randint(0, 4000), rng.randint(1, 64), 6400
        sizer.observe(step(*shape), seconds(*shape))
    size = sizer.choose(ChunkLoad(history, 8, 6400))
    assert size.tokens is not None
    assert size.predicted_s == pytest.approx(seconds(size.tokens, history, 8, 6400), rel=0.02)


@pytest.mark.slow
def test_prefill_steps_that_running_rows_wait_for_stay_within_the_target() -> None:
    """--disable-mixed-chunk: the rows are not in the step, and wait for it all the same."""
    driver = Driver(
        config(
            page_size=PAGE,
            capacity_tokens=32768,
            chunked_prefill_size=128,
            max_running_requests=16,
            tpot_slo_ms=40.0,
            disable_mixed_chunk=True,
        ),
        checked=False,
    )
    device, inner = Device(1, 0.02), driver.device.run
    times, sizes = [], []

    def run(batch: ScheduleBatch) -> StepOutput:
        output = inner(batch)
        context = sum(batch.prefix_lens[batch.num_prefill :]) + batch.num_decode
        history = batch.prefix_lens[0] if batch.num_prefill else 0
        output.device_s = device.seconds(batch.prefill_tokens, history, batch.num_decode, context)
        if batch.num_prefill and driver.scheduler.statistics().running:
            times.append(output.device_s)
            sizes.append(batch.prefill_tokens)
        return output

    driver.device.run = run  # type: ignore[method-assign]
    driver.add(*[request(f"stream{i}", 64, 2000) for i in range(8)])
    for turn in range(900):
        if turn % 60 == 20:
            driver.add(request(f"prompt{turn}", 500, 1))
        driver.step()
    assert len(times) > 15 * 500 / 128
    judged = times[9:]  # the first are there to learn from
    assert sum(t <= 0.040 for t in judged) / len(judged) >= 0.95
    assert max(sizes) > 2 * PAGE, "chunks stay far below what the target allows"
    assert driver.scheduler.slo_feasible is not False


def test_a_step_that_delays_nobody_gets_the_static_size() -> None:
    sizer = TimedChunkSizer(slo_config(11.0))
    assert sizer.choose(ChunkLoad(0, 0, 0)).tokens == 128


def test_options_choose_the_sizer() -> None:
    assert isinstance(make_chunk_sizer(config()), StaticChunkSizer)
    assert isinstance(make_chunk_sizer(config(enable_dynamic_chunking=True)), DynamicChunkSizer)
    assert isinstance(make_chunk_sizer(config(tpot_slo_ms=20.0)), TimedChunkSizer)
    off = make_chunk_sizer(config(chunked_prefill_size=-1))
    assert off.choose(ChunkLoad(0, 4, 100)).tokens is None


def test_dynamic_size_is_static_until_enough_steps_were_seen() -> None:
    sizer = DynamicChunkSizer(
        config(
            page_size=PAGE,
            capacity_tokens=1 << 20,
            chunked_prefill_size=512,
            context_length=1 << 20,
            enable_dynamic_chunking=True,
        )
    )
    sizes = []
    rng = random.Random(3)
    for index in range(40):
        history = 512 * (index % 20)
        sizes.append(sizer.choose(ChunkLoad(16384, 0, 0)).tokens)
        tokens = rng.randint(64, 512)
        seconds = 2e-5 * (tokens * tokens + 2 * tokens * history) + 0.5 * tokens + 7
        sizer.observe(step(tokens, history, 0, 0), seconds)
    # The first step is dropped, eight more are needed.
    assert sizes[:9] == [512] * 9
    assert sizes[9:] == [256] * 31


def test_the_model_finds_the_coefficients_of_exact_times() -> None:
    model = StepTimeModel()
    rng = random.Random(5)
    for _ in range(60):
        tokens, history, rows = rng.randint(1, 512), rng.randint(0, 4000), rng.randint(1, 64)
        shape = StepFeatures(tokens, tokens * (tokens + 2 * history), rows, rows * history)
        seconds = 3e-9 * shape.square + 5e-5 * tokens + 1e-4 * rows + 1e-8 * shape.context + 0.004
        model.observe(shape, seconds)
    fitted = model.coefficients
    assert fitted is not None
    assert fitted.square == pytest.approx(3e-9, rel=0.02)
    assert fitted.token == pytest.approx(5e-5, rel=0.02)
    assert fitted.constant == pytest.approx(0.004, rel=0.02)


def test_no_coefficient_is_negative() -> None:
    model = StepTimeModel()
    for index in range(30):
        tokens = 16 + 16 * (index % 3)
        model.observe(StepFeatures(tokens, tokens * tokens, 8, 100), 0.01 - 1e-5 * tokens)
    fitted = model.coefficients
    assert fitted is not None
    assert min(fitted) >= 0


def test_linear_solver_and_quantile() -> None:
    assert solve([[0.0, 2.0, 4.0], [1.0, 1.0, 5.0]]) == pytest.approx([3.0, 2.0])
    assert quantile([float(v) for v in range(100)], 0.95) == 95.0
    assert quantile([], 0.95) == 0.0
