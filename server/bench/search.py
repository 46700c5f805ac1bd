"""The highest arrival rate at which a server still keeps an SLO."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PRECISION = 1.05  # the search ends when the bounds are this close


@dataclass(slots=True)
class RateSearch:
    """What was tried.

    Attributes:
        trials: (rate, whether it was kept), in order.
        highest: the highest rate that was kept; None: none was.
        lowest_missed: the lowest that was not; None: all were kept, so the limit lies higher.
    """

    trials: list[tuple[float, bool]] = field(default_factory=list)
    highest: float | None = None
    lowest_missed: float | None = None


async def highest_rate(
    keeps: Callable[[float], Awaitable[bool]],
    first_rate: float,
    most_trials: int,
    precision: float = PRECISION,
) -> RateSearch:
    """Doubles or halves from `first_rate` until the limit lies between two rates, then halves the
    ratio between them. Takes at most `most_trials` calls of `keeps`."""
    search = RateSearch()
    rate = first_rate
    while len(search.trials) < most_trials:
        kept = await keeps(rate)
        search.trials.append((rate, kept))
        if kept:
            search.highest = rate
        else:
            search.lowest_missed = rate
        low, high = search.highest, search.lowest_missed
        if low is not None and high is not None:
            if high <= low * precision:
                break
            rate = sqrt(low * high)
        else:
            rate = rate * 2 if kept else rate / 2
    return search
