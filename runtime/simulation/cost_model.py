"""How long a step takes: a roofline with a few measurable parameters, and noise.

The model is deliberately not the quadratic that chunk sizing fits online (runtime.scheduling): it
has the knee between memory-bound and compute-bound steps, and its noise has a heavy tail, so a
latency target is not met in simulation merely because both sides use one formula.

    linear layers   step_s + token_s * max(0, tokens - knee_tokens)
    attention       pair_s per (query, key) pair of prefill rows, context_s per token that the
                    decode rows read
    sampling        row_s per decode row

Up to `knee_tokens` rows the weights' trip through memory hides the arithmetic (Williams et al.,
"Roofline", CACM 2009).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.scheduling.schedule_batch import ScheduleBatch


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step's time depends on.

    Args:
        prefill_tokens: new prompt tokens.
        prefill_pairs: (query, key) pairs of the prefill rows: x new tokens behind a history of L
            make x * L + x * (x + 1) / 2.
        decode_rows: rows that add one token.
        context_tokens: tokens that the decode rows attend to, the new ones included.
    """

    prefill_tokens: int = 0
    prefill_pairs: int = 0
    decode_rows: int = 0
    context_tokens: int = 0

    @classmethod
    def of(cls, batch: ScheduleBatch) -> StepWork:
        """The work of a planned step. Cost: O(rows), at the speed of `sum` for decode rows."""
        prefill, rows = batch.num_prefill, len(batch.rows)
        tokens = pairs = 0
        for i in range(prefill):
            length = batch.extend_lens[i]
            tokens += length
            pairs += length * batch.prefix_lens[i] + length * (length + 1) // 2
        decode = rows - prefill
        context = sum(batch.prefix_lens[prefill:]) + decode if decode else 0
        return cls(tokens, pairs, decode, context)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step, without noise, and the size of the noise.

    Args:
        step_s: a step of few rows: the weights read once, and launching.
        token_s: one more token through the linear layers, once they are compute-bound.
        knee_tokens: rows up to which the linear layers cost no more than one row.
        pair_s, context_s, row_s: see the head of this file.
        sigma: the noise's standard deviation, as a share of the step (log-normal).
        tail_probability, tail_index: how often a step is hit by something else on the machine,
            and the index of the Pareto factor (from 1 on) it is then stretched by.
    """

    step_s: float
    token_s: float
    knee_tokens: float = 0.0
    pair_s: float = 0.0
    context_s: float = 0.0
    row_s: float = 0.0
    sigma: float = 0.0
    tail_probability: float = 0.0
    tail_index: float = 3.0

    def seconds(self, work: StepWork) -> float:
        """The expected time of a step before noise."""
        beyond = work.prefill_tokens + work.decode_rows - self.knee_tokens
        return (
            self.step_s
            + (self.token_s * beyond if beyond > 0 else 0.0)
            + self.pair_s * work.prefill_pairs
            + self.context_s * work.context_tokens
            + self.row_s * work.decode_rows
        )


class StepTimer:
    """Draws the times of successive steps: the model's mean times seeded noise."""

    def __init__(self, model: CostModel, seed: int = 0) -> None:
        self.model = model
        self._random = random.Random(seed)

    def seconds(self, work: StepWork) -> float:
        """The time of the next step.

        The noise is centred on its median, as the measured times of a quiet machine are: the
        mean lies above the model by the tail. Whole nanoseconds, so that the last bit of another
        C library's `exp` makes no other run of it."""
        model, draw = self.model, self._random
        seconds = model.seconds(work)
        if model.sigma:
            seconds *= draw.lognormvariate(0.0, model.sigma)
        if model.tail_probability and draw.random() < model.tail_probability:
            seconds *= draw.paretovariate(model.tail_index)
        return round(seconds, 9)
