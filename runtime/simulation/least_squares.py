"""Weighted least squares with non-negative coefficients, for a handful of unknowns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.scheduling.least_squares import solve_nonnegative

if TYPE_CHECKING:
    from collections.abc import Sequence

Row = tuple[float, ...]


def fit_nonnegative(
    features: Sequence[Row], values: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Coefficients c >= 0 that make sum(w * (value - c . feature) ** 2) small.

    A coefficient that comes out negative (a feature that the data says nothing about) is held at
    0 and the others are solved again, the most negative one first. Columns are scaled to one
    size, since tokens squared and a constant differ by eight orders of magnitude.

    Args: features: one row per observation, at least one row.
    Returns: one coefficient per feature; 0 for those left out."""
    count = len(features[0])
    scales = [max(abs(row[i]) for row in features) or 1.0 for i in range(count)]
    gram = [[0.0] * count for _ in range(count)]
    right = [0.0] * count
    for row, value, weight in zip(features, values, weights, strict=True):
        scaled = [x / s for x, s in zip(row, scales, strict=True)]
        for i, x in enumerate(scaled):
            if x:
                wx = weight * x
                right[i] += wx * value
                for j in range(count):
                    gram[i][j] += wx * scaled[j]
    for i in range(count):
        # Makes features that the data cannot tell apart share their effect rather than fail.
        gram[i][i] *= 1 + 1e-10
    found = solve_nonnegative(gram, right)
    return [value / scale for value, scale in zip(found, scales, strict=True)]
