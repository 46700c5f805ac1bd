"""Least squares without negative coefficients, from the normal equations, for a few unknowns."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def solve_nonnegative(gram: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Solves gram c = right. A coefficient that comes out negative is held at 0, the most negative
    one first, and the others are solved again.

    Args:
        gram: sums of products of the features, with a ridge on the diagonal; a feature with a zero
            there is left out.

    Returns: one coefficient per feature, none negative; 0 for those left out.
    """
    coefficients = [0.0] * len(right)
    active = [i for i in range(len(right)) if gram[i][i] > 0.0]
    while active:
        solution = solve([[*(gram[i][j] for j in active), right[i]] for i in active])
        worst = min(range(len(active)), key=lambda k: solution[k])
        if solution[worst] >= 0.0:
            for i, value in zip(active, solution, strict=True):
                coefficients[i] = value
            break
        del active[worst]
    return coefficients


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
        known = 0.0
        # Not `sum`, which rounds otherwise from Python 3.12 on: a trace replays on every version.
        for k in range(i + 1, size):
            known += rows[i][k] * solution[k]
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution
