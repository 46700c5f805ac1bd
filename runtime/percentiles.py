"""Percentiles as every figure of the project has them, measured or simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def percentile(ordered: Sequence[float], share: float) -> float:
    """By linear interpolation between the closest ranks (numpy's default).

    Args: ordered: ascending, at least one. share: from 0, the smallest, to 1, the largest.
    Source: Hyndman and Fan, "Sample Quantiles in Statistical Packages" (1996), definition 7.
    """
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
