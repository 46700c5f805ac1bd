"""Weighted least squares with non-negative coefficients, for a handful of unknowns."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Row = tuple[float, ...]


def solve_linear(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float] | None:
    """Gaussian elimination with partial pivoting; None for a singular system."""
    size = len(right)
    rows = [[*map(float, line), float(value)] for line, value in zip(matrix, right, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(rows[r][column]))
        if abs(rows[pivot][column]) < 1e-12:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        head = rows[column]
        for below in range(column + 1, size):
            factor = rows[below][column] / head[column]
            if factor:
                rows[below] = [a - factor * b for a, b in zip(rows[below], head, strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution


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
    active = [i for i in range(count) if gram[i][i] > 0.0]
    while active:
        solution = _solve_active(gram, right, active)
        worst = min(range(len(active)), key=lambda k: solution[k])
        if solution[worst] >= 0.0:
            coefficients = [0.0] * count
            for i, c in zip(active, solution, strict=True):
                coefficients[i] = c / scales[i]
            return coefficients
        del active[worst]
    return [0.0] * count


def _solve_active(gram: list[list[float]], right: list[float], active: list[int]) -> list[float]:
    """The normal equations of the active features. A ridge of 1e-10 of each diagonal entry makes
    features that the data cannot tell apart share their effect rather than fail."""
    matrix = [[gram[i][j] * (1 + 1e-10 * (i == j)) for j in active] for i in active]
    solution = solve_linear(matrix, [right[i] for i in active])
    return solution if solution is not None else [0.0] * len(active)
