"""How many prefill tokens a step gets: fixed, fitted to equal times, or fitted to a time.

Asked once per pass that has prompts to compute; told the time of every step, which is an input
like any other (`StepOutput.device_s`, through `Scheduler.commit`), so that a replay chooses alike.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from runtime.scheduling.step_time_model import StepFeatures, StepTimeModel, TargetReach

if TYPE_CHECKING:
    from runtime.config import SchedulerConfig
    from runtime.scheduling.schedule_batch import ScheduleBatch
    from runtime.scheduling.step_time_model import Coefficients

SMOOTHING = 0.75
ALIGN_TOKENS = 64
NO_STATIC = 1 << 30
ENOUGH_SEEDS = 5  # steps measured at start are chosen to differ in every term
PAGE_PARTS = 4  # the smallest timed chunk of a started prompt is this part of a page
# A step that no running row waits for may take so many times what one takes that computes nothing.
LONE_STEP = 5
# A timed chunk is at most twice the largest of the last steps': a wrong prediction costs no more.
GROWTH, COMPARED_STEPS = 2, 8


class ChunkLoad(NamedTuple):
    """The step that a size is asked for.

    Args:
        history: tokens that the pending chunk's prompt has computed; 0 without one.
        rows, context: decode rows that ride along, and their tokens together.
        held_back: running rows that do not, and get no token while this step runs.
    """

    history: int
    rows: int
    context: int
    held_back: int = 0


class ChunkSize(NamedTuple):
    """What a step may compute of prompts.

    Args:
        tokens: at most so many; None: prompts are not cut.
        exact: prefill tokens alone; the decode rows are not subtracted again.
        predicted_s: what a step of that size is taken to last, margin included; None: not timed.
    """

    tokens: int | None
    exact: bool = False
    predicted_s: float | None = None


class ChunkSizer(Protocol):
    """Chooses chunk sizes, and learns from steps alone."""

    @property
    def feasible(self) -> bool | None:
        """Whether a target is held; None without one. Only told, nothing is decided by it."""

    def choose(self, load: ChunkLoad) -> ChunkSize:
        """The size for the step that is being planned."""

    def observe(self, batch: ScheduleBatch, seconds: float) -> None:
        """A step has taken so long on the device."""


def make_chunk_sizer(config: SchedulerConfig) -> ChunkSizer:
    """The sizer that the options ask for."""
    if config.tpot_slo_ms > 0 or config.step_bound_ms > 0:
        return TimedChunkSizer(config)
    if config.enable_dynamic_chunking and config.chunked_prefill_size > 0:
        return DynamicChunkSizer(config)
    return StaticChunkSizer(config)


class StaticChunkSizer:
    """--chunked-prefill-size."""

    feasible: bool | None = None

    def __init__(self, config: SchedulerConfig) -> None:
        size = config.chunked_prefill_size
        self._size = ChunkSize(size if size > 0 else None)

    def choose(self, load: ChunkLoad) -> ChunkSize:
        return self._size

    def observe(self, batch: ScheduleBatch, seconds: float) -> None:
        """Nothing to learn."""


class DynamicChunkSizer:
    """Chunks of a long prompt that take about the same time each, however long its history."""

    feasible: bool | None = None

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._model = StepTimeModel()

    def choose(self, load: ChunkLoad) -> ChunkSize:
        base = self._config.chunked_prefill_size
        fitted = self._model.coefficients
        if fitted is None or fitted.square <= 0:
            return ChunkSize(base)
        size = predict_next_chunk_size(
            load.history, fitted.square, fitted.token, base, self._config.page_size
        )
        most = min(self._config.max_prefill_tokens, self._config.context_length - load.history)
        return ChunkSize(max(min(size, most), self._config.page_size))

    def observe(self, batch: ScheduleBatch, seconds: float) -> None:
        self._model.observe(step_features(batch), seconds)


def predict_next_chunk_size(history: int, a: float, b: float, base: int, page_size: int) -> int:
    """Tokens after `history` that take as long as `base` tokens after none.

    A prefill of l tokens takes a l^2 + b l + c, so x more after L take a x^2 + (2 a L + b) x. The
    answer is smoothed towards `base`, at least a quarter of it, and aligned down.

    Args:
        a, b: seconds (or any unit) per token squared and per token; a > 0.
    """
    target = a * base * base + b * base
    linear = 2 * a * history + b
    exact = (math.sqrt(linear * linear + 4 * a * target) - linear) / (2 * a)
    smooth = base + SMOOTHING * (exact - base)
    # Never above the base: sizes are cut to it, not grown.
    align = min(max(page_size, ALIGN_TOKENS), max(base // page_size * page_size, 1))
    # The root comes out a hair below the whole number that it stands for.
    return max(int(max(smooth, base / 4) + 1e-6) // align * align, align)


class TimedChunkSizer:
    """The largest chunk whose predicted step stays within a time: --tpot-slo-ms for a step that
    running rows wait for, the default bound for every other one.

    The prediction is the model's mean plus the 95 % quantile of its recent errors: by the mean
    alone half of the steps would miss.

    A step that no running row waits for delays newcomers alone. Without a bound it gets the static
    size. With one it is never so small that most of it goes by whatever it computes: on a machine
    that is slow, or busy with other processes, a long prompt would take several times as long, and
    a newcomer would be little better off. How small that is, the first fit says: other processes
    slow all of a step alike, and make what is measured beside them vague.

    The model starts from the steps measured at start, where there are any.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._unit = config.truncation_align_size or config.page_size
        static = config.chunked_prefill_size
        self._static = ChunkSize(static if static > 0 else None)
        self._limit = min(static if static > 0 else NO_STATIC, config.max_prefill_tokens)
        self._bound_s = config.step_bound_ms / 1000
        self._target_s = config.tpot_slo_ms / 1000 or self._bound_s
        self._first_size = self._unit  # to learn from, before there is a model
        self._reach = TargetReach() if config.tpot_slo_ms else None
        # Where they are of another size, steps without decode rows say little of those with some.
        self._learns_from_all = config.disable_mixed_chunk or self._bound_s > 0
        self._model = StepTimeModel(ENOUGH_SEEDS) if config.measured_steps else StepTimeModel()
        self._recent: deque[StepFeatures] = deque(maxlen=COMPARED_STEPS)
        for *terms, seconds in config.measured_steps:
            features = StepFeatures(*map(int, terms))
            self._model.observe(features, seconds)
            self._recent.append(features)
        self._first_fit = self._model.coefficients

    @property
    def feasible(self) -> bool | None:
        """Whether the smallest chunks hold the target of late; None without a target, or before it
        is known. When it changes, and with which confidence: see `TargetReach`."""
        return None if self._reach is None else self._reach.within

    def choose(self, load: ChunkLoad) -> ChunkSize:
        awaited = load.rows or load.held_back
        target_s = self._target_s if awaited else self._bound_s
        if not target_s:
            return self._static
        fitted = self._model.coefficients
        if fitted is None:
            return ChunkSize(self._first_size, exact=True)
        self._first_fit = self._first_fit or fitted
        fixed = fitted.seconds(StepFeatures(0, 0, load.rows, load.context)) + self._model.margin_s
        limit = self._limit_of_growth(fitted, load.history)
        most = _largest_within(target_s - fixed, *fitted[:2], load.history, limit)
        if not awaited:
            most = max(most, min(_worth_a_step(self._first_fit, load.history), limit))
        unit = self._unit if most >= self._unit else self._smallest(load.history)
        # Out of reach is out of reach: the smallest pieces would only make it last longer.
        size = most // unit * unit or self._unit
        predicted_s = fixed + _prefill_s(fitted.square, fitted.token, size, load.history)
        return ChunkSize(size, exact=True, predicted_s=predicted_s)

    def _limit_of_growth(self, fitted: Coefficients, history: int) -> int:
        """Most tokens of a step: at most twice what one of the recent steps had, in number, or by
        the same prediction, by which few tokens behind a long history are as much as many that
        begin a prompt."""
        a, b, recent = fitted.square, fitted.token, self._recent
        most = max([features.tokens for features in recent])
        most_s = max([a * features.square + b * features.tokens for features in recent])
        as_much = _largest_within(GROWTH * most_s, a, b, history, self._limit) if most_s else 0
        return min(max(GROWTH * most, as_much), self._limit)

    def _smallest(self, history: int) -> int:
        """A prompt begins with a page, and may go on with parts of one: beside a few rows of a
        small model on a CPU, computing a page of 16 tokens takes as long as the decode step, and
        the end of a long prompt would miss a target of twice that step."""
        if not history or self._config.truncation_align_size:
            return self._unit
        return max(self._unit // PAGE_PARTS, 1)

    def observe(self, batch: ScheduleBatch, seconds: float) -> None:
        features = step_features(batch)
        if not features.rows and not self._learns_from_all:
            return
        self._model.observe(features, seconds)
        if not features.tokens:
            return
        self._recent.append(features)
        self._next_first_size(seconds)
        if self._reach is not None:
            smallest_s = self._with_smallest_chunk(batch, features, seconds)
            if smallest_s is not None:
                self._reach.observe(held=smallest_s <= self._target_s)

    def _next_first_size(self, seconds: float) -> None:
        """Doubling from one page while half the target holds, back on a miss. Sizes that differ are
        what a fit needs."""
        size, unit = self._first_size, self._unit
        if seconds <= self._target_s / 2:
            self._first_size = min(size * 2, self._limit)
        else:
            self._first_size = max(size // 2 // unit * unit, unit)

    def _with_smallest_chunk(
        self, batch: ScheduleBatch, features: StepFeatures, seconds: float
    ) -> float | None:
        """What this step would have taken with the smallest chunk in place of its own: a larger
        one that missed says nothing against the target. None before there is a model."""
        fitted = self._model.coefficients
        if fitted is None:
            return None
        history = batch.prefix_lens[0]
        tokens = min(self._smallest(history), features.tokens)
        spared = fitted.square * features.square + fitted.token * features.tokens
        return seconds - spared + _prefill_s(fitted.square, fitted.token, tokens, history)


def _prefill_s(a: float, b: float, tokens: int, history: int) -> float:
    return a * (tokens * tokens + 2 * history * tokens) + b * tokens


def _worth_a_step(fitted: Coefficients, history: int) -> int:
    """Tokens with which a step takes `LONE_STEP` times what an empty one does."""
    seconds = (LONE_STEP - 1) * fitted.constant
    return _largest_within(seconds, fitted.square, fitted.token, history, NO_STATIC)


def _largest_within(seconds: float, a: float, b: float, history: int, limit: int) -> int:
    """Most tokens, up to `limit`, that take no longer."""
    if seconds <= 0:
        return 0
    linear = 2 * a * history + b
    if a <= 0:
        return limit if linear * limit <= seconds else int(seconds / linear)
    # The stable form of the root: no difference of two large numbers when a is tiny.
    root = math.sqrt(linear * linear + 4 * a * seconds)
    return min(int(2 * seconds / (linear + root)), limit)


def step_features(batch: ScheduleBatch) -> StepFeatures:
    """What the time of a step depends on."""
    prefill = zip(batch.extend_lens[: batch.num_prefill], batch.prefix_lens, strict=False)
    square = sum(extend * (extend + 2 * prefix) for extend, prefix in prefill)
    context = sum(batch.prefix_lens[batch.num_prefill :]) + batch.num_decode
    return StepFeatures(batch.prefill_tokens, square, batch.num_decode, context)
