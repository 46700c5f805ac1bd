"""Two servers under the same loads, in turn.

What else runs on a machine comes and goes, so a pair of runs right after one another is compared
with itself alone, and who goes first alternates.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

Result = TypeVar("Result")
# Paths into a summary.
FIGURES = (
    *("output_tokens_per_s", "requests_per_s", "goodput_per_s"),
    *("ttft_ms.p50", "ttft_ms.p99", "tpot_ms.p50", "itl_ms.p50", "itl_ms.p99", "itl_ms.max"),
    *("e2e_ms.p50", "e2e_ms.p99"),
)


async def in_turn(
    pairs: int,
    first: Callable[[int], Awaitable[Result]],
    second: Callable[[int], Awaitable[Result]],
) -> list[tuple[Result, Result]]:
    """Both results of each pair; the callables get the number of the pair, from 0."""
    results = []
    for number in range(pairs):
        if number % 2 == 0:
            one = await first(number)
            other = await second(number)
        else:
            other = await second(number)
            one = await first(number)
        results.append((one, other))
    return results


def ratios(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """For each figure that both servers have in some pair, the second's as a multiple of the
    first's: the median over the pairs with the smallest and the largest."""
    found = {}
    for path in FIGURES:
        multiples = []
        for one, other in pairs:
            base, value = figure(one, path), figure(other, path)
            if base and value is not None:
                multiples.append(value / base)
        if multiples:
            found[path] = {
                "median": round(statistics.median(multiples), 4),
                "min": round(min(multiples), 4),
                "max": round(max(multiples), 4),
                "pairs": len(multiples),
            }
    return found


def figure(summary: dict[str, Any], path: str) -> float | None:
    """The number under "a.b" of a record; None where there is none."""
    value: Any = summary
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, int | float) else None
