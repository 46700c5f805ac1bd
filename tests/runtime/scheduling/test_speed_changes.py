"""Chunks sized by time on a machine whose speed changes: other processes come and go."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median

import pytest

from runtime.scheduling.chunk_sizer import ChunkLoad, TimedChunkSizer
from runtime.scheduling.step_time_model import measure_steps
from tests.runtime.scheduling.scheduler_harness import config
from tests.runtime.scheduling.test_chunk_sizer import Device, step

BOUND_S = 0.150
LOADED = range(200, 400)  # steps with prefill tokens during which others compute as well
ROWS = 8
Slowness = Callable[[int], float]


def served(device: Device, slowness: Slowness, steps: int = 700) -> list[tuple[int, float]]:
    """(chunk, seconds) of each mixed step: long and short prompts beside decoding rows."""
    measured = measure_steps(
        lambda tokens, history, rows, cached: device.seconds(tokens, history, rows, rows * cached),
        bound_s=BOUND_S,
        context_length=8192,
    )
    sizer = TimedChunkSizer(
        config(
            page_size=16,
            capacity_tokens=32768,
            context_length=8192,
            chunked_prefill_size=0,
            step_bound_ms=1e3 * BOUND_S,
            measured_steps=measured,
        )
    )
    found: list[tuple[int, float]] = []
    while len(found) < steps:
        length = device.random.choice([20, 30, 64, 1500, 1500])
        context, history = ROWS * device.random.randint(100, 400), 0
        for _ in range(3):
            seconds = slowness(len(found)) * device.seconds(0, 0, ROWS, context)
            sizer.observe(step(0, 0, ROWS, context), seconds)
        while history < length:
            size = sizer.choose(ChunkLoad(history, ROWS, context)).tokens
            assert size is not None
            tokens = min(size, length - history)
            seconds = slowness(len(found)) * device.seconds(tokens, history, ROWS, context)
            sizer.observe(step(tokens, history, ROWS, context), seconds)
            found.append((size, seconds))
            history += tokens
    return found


def steadily(factor: float) -> Slowness:
    return lambda number: factor if number in LOADED else 1.0


def erratically(factor: float, seed: int) -> Slowness:
    """Others compute now and then, for a few steps at a time, and take more or less."""
    draw, on = random.Random(seed), False

    def slowness(number: int) -> float:
        nonlocal on
        if number not in LOADED:
            return 1.0
        if draw.random() < 0.25:
            on = draw.random() < 0.5
        return draw.lognormvariate(0.0, 0.3) * (factor if on else 1.0)

    return slowness


def usual(found: list[tuple[int, float]]) -> float:
    """The chunk before the load comes."""
    return median(size for size, _ in found[50 : LOADED.start])


def steps_to_recover(found: list[tuple[int, float]]) -> int:
    """Steps from the end of the load until ten chunks are most of what they were."""
    sizes = [size for size, _ in found[LOADED.stop :]]
    at = (at for at in range(len(sizes)) if median(sizes[at : at + 10]) >= 0.7 * usual(found))
    return next(at, len(sizes))


@pytest.mark.parametrize("seed", range(4))
def test_a_slower_machine_gets_smaller_chunks_within_a_few_steps_and_back(seed: int) -> None:
    found = served(Device(seed), steadily(5.0))
    # Nothing tells of the change but the steps that it makes slow.
    known = [seconds for _, seconds in found[LOADED.start + 4 : LOADED.stop]]
    assert sum(seconds <= BOUND_S for seconds in known) >= 0.95 * len(known)
    assert max(known) <= 1.5 * BOUND_S
    assert steps_to_recover(found) <= 6
    after = [seconds for _, seconds in found[LOADED.stop :]]
    assert sum(seconds <= BOUND_S for seconds in after) >= 0.95 * len(after)
    assert max(after) <= 1.6 * BOUND_S  # one step in a hundred takes half as long again


@pytest.mark.parametrize("seed", [2, 4, 7, 11])
def test_an_erratic_machine_makes_no_chunk_much_larger_than_a_quiet_one(seed: int) -> None:
    found = served(Device(seed), erratically(8.0, seed))
    assert max(size for size, _ in found[LOADED.start :]) <= 1.3 * usual(found)
    assert steps_to_recover(found) <= 64  # the steps whose residuals make the margin
    after = [seconds for _, seconds in found[LOADED.stop :]]
    assert sum(seconds <= BOUND_S for seconds in after) >= 0.95 * len(after)


def test_a_chunk_is_at_most_twice_what_the_last_steps_had() -> None:
    """By its few steps, tokens cost nothing on this machine, and 8,192 would be within the bound."""
    sizer = TimedChunkSizer(
        config(page_size=16, capacity_tokens=32768, chunked_prefill_size=0, step_bound_ms=150.0)
    )
    for number in range(40):
        sizer.observe(step(16 + number % 16, 0, ROWS, 800), 0.050)
    sizes = []
    for _ in range(6):
        size = sizer.choose(ChunkLoad(0, ROWS, 800)).tokens
        assert size is not None
        sizes.append(size)
        sizer.observe(step(size, 0, ROWS, 800), 0.050)
    # Twice the 23 tokens of the longest of the last eight steps, in whole pages, and so on.
    assert sizes == [32, 64, 128, 256, 512, 1024]
