"""StepTimeModel: how long a step takes, learned from the steps that ran.

    seconds = a * (x^2 + 2 L x) + b * x + d * rows + e * context + c

for x prefill tokens after L tokens of history, beside decode rows with that many context tokens in
all. Linear least squares on the normal equations, older steps fading out; a small ridge keeps it
solvable while the steps are all alike. Plain Python: five unknowns.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

FORGETTING = 0.995  # per step with prefill tokens
DECODE_WEIGHT = 0.1  # of a step without any: they are many, and say nothing of x
RIDGE = 1e-6
MIN_SAMPLES = 8
RECENT = 64  # steps whose residuals make the margin
# The features in units that make them of size one, so that one ridge suits all.
_SCALES = (1e-6, 1e-2, 1e-2, 1e-4, 1.0)


class StepShape(NamedTuple):
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

    def seconds(self, shape: StepShape) -> float:
        return (
            self.square * shape.square
            + self.token * shape.tokens
            + self.row * shape.rows
            + self.context * shape.context
            + self.constant
        )


class StepTimeModel:
    """Online regression of step times.

    The first step is dropped: it pays for what is done once.

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

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learns from one step."""
        self._seen += 1
        if self._seen == 1:
            return
        weight = 1.0 if shape.tokens else DECODE_WEIGHT
        if shape.tokens:
            fitted = self.coefficients
            if fitted is not None:
                self._residuals.append(seconds - fitted.seconds(shape))
            self._prefill_steps += 1
        fade = FORGETTING if shape.tokens else FORGETTING**DECODE_WEIGHT
        values = (shape.square, shape.tokens, shape.rows, shape.context, 1)
        scaled = [value * scale for value, scale in zip(values, _SCALES, strict=True)]
        for i, left in enumerate(scaled):
            row = self._gram[i]
            for j, right in enumerate(scaled):
                row[j] = fade * row[j] + weight * left * right
            self._moment[i] = fade * self._moment[i] + weight * left * seconds
        self._stale = True

    def _fit(self) -> Coefficients:
        """Least squares without negative coefficients: a term that comes out negative is left out,
        the most negative first, and the others are fitted again."""
        active = list(range(len(_SCALES)))
        while True:
            found = self._solve(active)
            worst = min(active, key=lambda i: found[i])
            if found[worst] >= 0 or len(active) == 1:
                break
            active.remove(worst)
        return Coefficients(*(max(v, 0.0) * s for v, s in zip(found, _SCALES, strict=True)))

    def _solve(self, active: list[int]) -> list[float]:
        """The normal equations over the active terms, zeros for the others."""
        rows = [
            [self._gram[i][j] + (RIDGE if i == j else 0.0) for j in active] + [self._moment[i]]
            for i in active
        ]
        solution = solve(rows)
        found = [0.0] * len(_SCALES)
        for i, value in zip(active, solution, strict=True):
            found[i] = value
        return found


def solve(rows: list[list[float]]) -> list[float]:
    """Solves the linear equations [A | b] by elimination with pivoting; changes `rows`."""
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(rows[r][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        head = rows[column]
        for row in rows[column + 1 :]:
            factor = row[column] / head[column]
            for k in range(column, size + 1):
                row[k] -= factor * head[k]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][k] * solution[k] for k in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution


def quantile(values: deque[float] | list[float], share: float) -> float:
    """The value that this share of `values` does not exceed; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
