"""A cost model fitted to measured steps, in pure Python."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from runtime.errors import LoomserveError
from runtime.simulation.cost_model import CostModel, StepWork
from runtime.simulation.least_squares import fit_nonnegative

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_STEPS = 16
MAX_STEPS = 4000  # more of them are thinned out evenly
# Above 512 rows any device is compute-bound.
KNEES = (0, *sorted({round(2 ** (k / 2)) for k in range(19)}))
# A step that takes this many times its expected time was hit by something else on the machine:
# it says how heavy the tail is, and nothing about the parameters.
OUTLIER_RATIO = 1.5


@dataclass(frozen=True, slots=True)
class StepTime:
    """A measured step."""

    work: StepWork
    seconds: float


@dataclass(frozen=True, slots=True)
class CostFit:
    """A fitted model and how well it describes what it was fitted to.

    Args:
        steps: measurements used; outliers: those taken for disturbances and left out.
        error: median of |measured / predicted - 1| over all steps.
    """

    model: CostModel
    steps: int
    outliers: int
    error: float


def fit_cost_model(times: Sequence[StepTime]) -> CostFit:
    """The cost model that describes measured steps best.

    Least squares of the *relative* error (a decode step of 10 ms counts as much as a prefill step
    of 500 ms), twice: the second time without outliers. The knee is the one of a small set of
    candidates with the least error, since for a given knee the model is linear.

    Raises: LoomserveError: fewer than 16 steps, or none with a time."""
    usable = [time for time in times if time.seconds > 0.0]
    if len(usable) < MIN_STEPS:
        raise LoomserveError(
            f"a cost model needs at least {MIN_STEPS} measured steps, {len(usable)} given"
        )
    usable = usable[:: -(-len(usable) // MAX_STEPS)]
    model = _best_knee(usable)
    inliers = [t for t in usable if t.seconds <= OUTLIER_RATIO * model.seconds(t.work)]
    if MIN_STEPS <= len(inliers) < len(usable):
        model = _best_knee(inliers)
    ratios = [t.seconds / max(model.seconds(t.work), 1e-9) for t in usable]
    return CostFit(
        model=_with_noise(model, ratios),
        steps=len(usable),
        outliers=sum(ratio > OUTLIER_RATIO for ratio in ratios),
        error=median(abs(ratio - 1.0) for ratio in ratios),
    )


def _best_knee(times: Sequence[StepTime]) -> CostModel:
    return min((_fit_at(times, knee) for knee in KNEES), key=lambda fit: fit[0])[1]


def _fit_at(times: Sequence[StepTime], knee: int) -> tuple[float, CostModel]:
    features = []
    for time in times:
        work = time.work
        beyond = max(0, work.prefill_tokens + work.decode_rows - knee)
        features.append(
            (
                1.0,
                float(beyond),
                float(work.prefill_pairs),
                float(work.context_tokens),
                float(work.decode_rows),
            )
        )
    weights = [1.0 / time.seconds**2 for time in times]
    step, token, pair, context, row = fit_nonnegative(features, [t.seconds for t in times], weights)
    model = CostModel(step, token, float(knee), pair, context, row)
    error = math.fsum((model.seconds(t.work) / t.seconds - 1.0) ** 2 for t in times)
    return error, model


def _with_noise(model: CostModel, ratios: list[float]) -> CostModel:
    """Adds the noise seen in measured / predicted: log-normal body, Pareto tail.

    The tail's index is Hill's estimate over the outliers, as factors over the threshold."""
    body = [math.log(ratio) for ratio in ratios if ratio <= OUTLIER_RATIO]
    tail = [math.log(ratio / OUTLIER_RATIO) for ratio in ratios if ratio > OUTLIER_RATIO]
    sigma = math.sqrt(math.fsum(x * x for x in body) / len(body)) if body else 0.0
    if not tail:
        return replace(model, sigma=sigma)
    index = len(tail) / max(math.fsum(tail), 1e-6)
    # The tail starts at a factor of 1, so the share beyond the threshold is what is left of it.
    share = len(tail) / len(ratios) * OUTLIER_RATIO**index
    return replace(model, sigma=sigma, tail_probability=min(share, 1.0), tail_index=index)
