"""What came into a latency histogram since it was last looked at. Observing costs nothing more."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.generation.metrics import Histogram

QUANTILE = 0.95


class LatencyWindow:
    """Args: histogram: of seconds; only read."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._counts = list(histogram.counts)
        self._sum = histogram.sum

    def news(self) -> dict[str, float | int | None]:
        """How many observations came since the last call, their mean, and the upper bound of the
        bucket that the 95th percentile is in; None where there are none."""
        histogram = self._histogram
        counts = [now - then for now, then in zip(histogram.counts, self._counts, strict=True)]
        total, added = sum(counts), histogram.sum - self._sum
        self._counts, self._sum = list(histogram.counts), histogram.sum
        if not total:
            return {"count": 0, "mean_ms": None, "p95_ms": None}
        below, rank = 0, 0
        while below + counts[rank] < QUANTILE * total:
            below += counts[rank]
            rank += 1
        bounds = histogram.bounds
        upper = bounds[min(rank, len(bounds) - 1)]
        return {"count": total, "mean_ms": 1e3 * added / total, "p95_ms": 1e3 * upper}
