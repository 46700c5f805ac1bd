"""What the times of measured steps say: how long another step will take (StepTimeModel), from what
that is learned at start (measure_steps), and whether a target is within reach (TargetReach).

    seconds = a * (x^2 + 2 L x) + b * x + d * rows + e * context + c

for x prefill tokens after L tokens of history, beside decode rows with that many context tokens in
all. Linear least squares on the normal equations, older steps fading out; a small ridge keeps it
solvable while the steps are all alike. Plain Python: five unknowns.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from runtime.scheduling.least_squares import solve_nonnegative

FORGETTING = 0.995  # per step with prefill tokens
DECODE_WEIGHT = 0.1  # of a step without any: they are many, and say nothing of x
RIDGE = 1e-6
MIN_SAMPLES = 8
RECENT = 64  # steps whose residuals make the margin
CHANGE = 2.0  # a step beyond this factor of its prediction is not noise
SLOWER, FASTER = 3, 5  # so many of them in a row are a change of the machine's speed
# The features in units that make them of size one, so that one ridge suits all.
_SCALES = (1e-6, 1e-2, 1e-2, 1e-4, 1.0)


class StepFeatures(NamedTuple):
    """What a step's time depends on.

    Args:
        tokens: prefill tokens (x). square: sum over its prompts of x^2 + 2 L x.
        rows, context: decode rows, and the tokens that they attend to together.
    """

    tokens: int
    square: int
    rows: int
    context: int


class Coefficients(NamedTuple):
    """Seconds per unit of each term, none negative."""

    square: float
    token: float
    row: float
    context: float
    constant: float

    def seconds(self, features: StepFeatures) -> float:
        """What a step with these features takes."""
        return (
            self.square * features.square
            + self.token * features.tokens
            + self.row * features.rows
            + self.context * features.context
            + self.constant
        )


class StepTimeModel:
    """Online regression of step times.

    The first step is dropped: it pays for what is done once. The slower a step was than predicted,
    the less it weighs: what other processes take away says nothing of what a token costs. Where
    it goes on, the machine runs at another speed, and all that is known is taken to that speed at
    once: the proportions of the terms are what they were.

    Args:
        enough: steps with prefill tokens before which `coefficients` is None. Steps of a load are
            much alike, so that it takes more of them than there are unknowns.
    """

    def __init__(self, enough: int = MIN_SAMPLES) -> None:
        self._enough = enough
        size = len(_SCALES)
        self._gram = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size
        self._seen = 0
        self._prefill_steps = 0
        self._stale = True
        self._fitted: Coefficients | None = None
        self._residuals: deque[float] = deque(maxlen=RECENT)
        self._ratios: deque[float] = deque(maxlen=FASTER)  # measured over predicted

    @property
    def coefficients(self) -> Coefficients | None:
        if self._stale and self._prefill_steps >= self._enough:
            self._fitted = self._fit()
            self._stale = False
        return self._fitted

    @property
    def margin_s(self) -> float:
        """What the time of 95 % of the recent steps with prefill tokens stayed within beyond its
        prediction, made before the step was seen."""
        return max(quantile(self._residuals, 0.95), 0.0)

    def observe(self, features: StepFeatures, seconds: float) -> None:
        """Learns from one step."""
        self._seen += 1
        if self._seen == 1:
            return
        weight = 1.0 if features.tokens else DECODE_WEIGHT
        if features.tokens:
            fitted = self.coefficients
            predicted = 0.0 if fitted is None else fitted.seconds(features)
            if predicted > 0:
                self._judge(seconds, predicted)
                weight = predicted / max(seconds, predicted)
            self._prefill_steps += 1
        fade = FORGETTING if features.tokens else FORGETTING**DECODE_WEIGHT
        values = (features.square, features.tokens, features.rows, features.context, 1)
        scaled = [value * scale for value, scale in zip(values, _SCALES, strict=True)]
        for i, left in enumerate(scaled):
            row = self._gram[i]
            for j, right in enumerate(scaled):
                row[j] = fade * row[j] + weight * left * right
            self._moment[i] = fade * self._moment[i] + weight * left * seconds
        self._stale = True

    def _judge(self, seconds: float, predicted: float) -> None:
        """Notes how far a prediction was off, and looks for a change of speed. Residuals from
        before a change stay: where the speed goes up and down, the margin is to cover that."""
        self._residuals.append(seconds - predicted)
        self._ratios.append(seconds / predicted)
        ratios = list(self._ratios)
        few = ratios[-SLOWER:]
        slower = len(few) == SLOWER and min(few) > CHANGE
        if slower or (len(ratios) == FASTER and max(ratios) < 1 / CHANGE):
            factor = sorted(few)[SLOWER // 2]
            self._moment = [value * factor for value in self._moment]
            self._ratios.clear()

    def _fit(self) -> Coefficients:
        gram = [row[:] for row in self._gram]
        for i, row in enumerate(gram):
            row[i] += RIDGE
        found = solve_nonnegative(gram, self._moment)
        return Coefficients(*(value * scale for value, scale in zip(found, _SCALES, strict=True)))


def quantile(values: deque[float] | list[float], share: float) -> float:
    """The value that this share of `values` does not exceed; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


StepTimer = Callable[[int, int, int, int], float]
MeasuredSteps = tuple[tuple[float, ...], ...]

# The steps measured at start.
HISTORY = 2048
ROWS = 8
SHORT, LONG = 64, 512  # cached tokens of a decode row
SIZES = ((4, SHORT), (8, LONG), (16, SHORT))  # and of the decode rows beside them
LARGEST = 1024
FIRST = (1, 0, 0, 0)  # the first whose time counts, as `StepTimer` has it
BUDGET_S = 2.0  # a model so slow that this ends the measurement learns the rest while it serves


def measure_steps(time_step: StepTimer, *, bound_s: float, context_length: int) -> MeasuredSteps:
    """Times steps, for the model to start from, until the bound is in sight or the time is up.

    The steps are few, small and unlike each other: pieces of a prompt alone, beside decode rows,
    and behind a history, so that every term of the model shows in some. Larger pieces follow as
    long as they stay well within the bound, since time does not grow evenly where bandwidth still
    hides arithmetic. The result is part of the scheduler's recorded configuration: a replay starts
    alike.

    Args:
        time_step: runs a step of (prompt tokens, tokens before them, decode rows, cached tokens of
            each row) and gives its seconds.
    Returns:
        (tokens, square, rows, context, seconds) of each, see `StepFeatures`.
    """
    found: list[tuple[float, ...]] = []

    def measure(tokens: int, history: int, rows: int, row_tokens: int) -> float:
        seconds = time_step(tokens, history, rows, row_tokens)
        square = tokens * (tokens + 2 * history)
        found.append((tokens, square, rows, rows * (row_tokens + 1), seconds))
        return seconds

    if context_length < 2 * LONG:
        return ()  # a toy: it is learned in no time
    time_step(1, 0, ROWS, SHORT)  # whatever is done once is done here
    spent = measure(*FIRST)
    history = min(HISTORY, context_length // 2)
    tokens, seconds = 0, 0.0
    for tokens, cached in SIZES:
        for shape in ((0, 0, 0), (0, ROWS, cached), (history, 0, 0)):
            if spent > BUDGET_S:
                return tuple(found)
            spent += measure(tokens, *shape)
    while spent < BUDGET_S and seconds < bound_s / 2 and tokens < min(LARGEST, context_length // 2):
        tokens *= 2
        seconds = measure(tokens, 0, ROWS, SHORT)
        spent += seconds
    return tuple(found)


FEW_MISSES = 0.05  # a target that this share of the steps misses is held
MANY_MISSES = 0.20  # one that this share misses is not
CONFIDENCE = 0.99

_MISSED = math.log(MANY_MISSES / FEW_MISSES)
_HELD = math.log((1 - MANY_MISSES) / (1 - FEW_MISSES))
_CERTAIN = math.log(CONFIDENCE / (1 - CONFIDENCE))


class TargetReach:
    """Says of a stream of held and missed steps whether the target can be held.

    Each step tells for or against one of two readings: that 5 % of the steps miss the target, or
    that 20 % do. Their log-likelihood ratio is added up and kept within the bounds at which one of
    them is 99 times as likely as the other (Wald's sequential test, 1945, without an end):

    - confidence: nothing is said before a bound is reached, and the answer changes only when the
      other bound is. Three misses out of sixty-four change nothing, whichever three they are.
    - hysteresis: between the bounds lies the whole band, so an answer that has just changed needs
      as much to change back: 7 misses in a row, or 54 steps without one. Where between 5 and 20 %
      of the steps miss, the answer may stay what it was, and it hardly ever flickers.
    """

    def __init__(self) -> None:
        self._score = 0.0  # towards many misses
        self.within: bool | None = None  # None: not known yet

    def observe(self, *, held: bool) -> None:
        """Takes one more step into account."""
        score = self._score + (_HELD if held else _MISSED)
        self._score = min(max(score, -_CERTAIN), _CERTAIN)
        if abs(self._score) >= _CERTAIN:
            self.within = self._score < 0
