"""Steps that no running row waits for, sized by time: a long prompt alone on a slow or busy machine.

Nobody's next token waits for such a step, only who arrives meanwhile. So it is not cut to pieces that
cost more than they compute.
"""

from __future__ import annotations

import random
from statistics import median

import pytest

from runtime.scheduling.chunk_sizer import ChunkLoad, TimedChunkSizer
from runtime.scheduling.step_time_model import measure_steps
from tests.runtime.scheduling.scheduler_harness import config
from tests.runtime.scheduling.test_chunk_sizer import step

BOUND_S = 0.150
LENGTH = 6000


class Machine:
    """Every step reads the weights, and computes its tokens.

    Args:
        fixed_s: of every step. token_s: of a token.
    """

    def __init__(self, fixed_s: float, token_s: float = 0.27e-3) -> None:
        self.fixed_s = fixed_s
        self.token_s = token_s

    def seconds(self, tokens: int, history: int, rows: int, context: int) -> float:
        attention = 2e-8 * (tokens * (history + tokens / 2) + context)
        return self.fixed_s + self.token_s * (tokens + rows) + attention


def sizer_for(machine: Machine) -> TimedChunkSizer:
    measured = measure_steps(
        lambda tokens, history, rows, cached: machine.seconds(tokens, history, rows, rows * cached),
        bound_s=BOUND_S,
        context_length=8192,
    )
    return TimedChunkSizer(
        config(
            page_size=16,
            capacity_tokens=32768,
            context_length=8192,
            chunked_prefill_size=0,
            step_bound_ms=1e3 * BOUND_S,
            measured_steps=measured,
        )
    )


def prompt_alone(
    machine: Machine, sizer: TimedChunkSizer, slowness: float, seed: int | None
) -> list[tuple[int, float]]:
    """(chunk, seconds) of each step of one long prompt; with a seed, now and then others take most
    of the machine, for a few steps at a time."""
    draw, on = random.Random(seed), False
    found: list[tuple[int, float]] = []
    history = 0
    while history < LENGTH:
        if draw.random() < 0.25:
            on = seed is None or draw.random() < 0.7
        size = sizer.choose(ChunkLoad(history, 0, 0)).tokens
        assert size is not None
        tokens = min(size, LENGTH - history)
        seconds = machine.seconds(tokens, history, 0, 0)
        if on or seed is None:
            seconds *= slowness
        if seed is not None:
            seconds *= draw.lognormvariate(0.0, 0.3)
        sizer.observe(step(tokens, history, 0, 0), seconds)
        found.append((tokens, seconds))
        history += tokens
    return found


def cost(machine: Machine, chunks: list[int]) -> float:
    """Seconds that a prompt takes in these chunks on the machine alone."""
    total, history = 0.0, 0
    for tokens in chunks:
        total += machine.seconds(tokens, history, 0, 0)
        history += tokens
    return total


def in_chunks_of(size: int) -> list[int]:
    return [min(size, LENGTH - start) for start in range(0, LENGTH, size)]


@pytest.mark.parametrize("seed", range(5))
def test_under_foreign_load_a_long_prompt_costs_little_more_than_in_fixed_chunks(seed: int) -> None:
    machine = Machine(fixed_s=0.012)
    sizer = sizer_for(machine)
    for prompt in range(4):
        found = prompt_alone(machine, sizer, 8.0, 10 * seed + prompt)
        chunks = [tokens for tokens, _ in found]
        assert cost(machine, chunks) <= 1.25 * cost(machine, in_chunks_of(512))


@pytest.mark.parametrize("slowness", [1.0, 5.0, 20.0])
def test_who_arrives_waits_for_as_long_as_a_few_tokens_take_there(slowness: float) -> None:
    machine = Machine(fixed_s=0.012)
    sizer = sizer_for(machine)
    for _ in range(3):
        found = prompt_alone(machine, sizer, slowness, None)
    longest = max(seconds for _, seconds in found)
    assert longest <= 1.1 * max(BOUND_S, 5 * slowness * machine.fixed_s)


def test_a_quiet_machine_gets_what_the_bound_allows() -> None:
    machine = Machine(fixed_s=0.012)
    sizer = sizer_for(machine)
    found = prompt_alone(machine, sizer, 1.0, None)
    assert median(seconds for _, seconds in found[2:-1]) == pytest.approx(BOUND_S, rel=0.05)


def test_where_weights_alone_take_longer_than_the_bound_prompts_are_not_computed_page_by_page() -> (
    None
):
    machine = Machine(fixed_s=0.7, token_s=9e-3)
    found = prompt_alone(machine, sizer_for(machine), 1.0, None)
    computing = sum(seconds - machine.fixed_s for _, seconds in found)
    assert computing >= 0.75 * sum(seconds for _, seconds in found)
    assert max(seconds for _, seconds in found) <= 1.1 * 5 * machine.fixed_s


def test_a_running_row_brings_the_bound_back_at_once() -> None:
    machine = Machine(fixed_s=0.012)
    sizer = sizer_for(machine)
    for _ in range(3):
        prompt_alone(machine, sizer, 5.0, None)
    for rows, held_back in ((1, 0), (0, 1)):
        size = sizer.choose(ChunkLoad(0, rows, 100 * rows, held_back)).tokens
        assert size is not None
        assert 5.0 * machine.seconds(size, 0, rows, 100 * rows) <= BOUND_S
