"""What a simulation says, as numbers and as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.percentiles import percentile
from runtime.simulation.simulator import completed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from runtime.simulation.simulator import SimulationResult


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, median, 99th percentile and largest of some times, in seconds; nan for none."""

    mean: float
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        ordered = sorted(values)
        if not ordered:
            return cls(math.nan, math.nan, math.nan, math.nan)
        mean = sum(ordered) / len(ordered)
        return cls(mean, percentile(ordered, 0.5), percentile(ordered, 0.99), ordered[-1])


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures by which runs are compared.

    Args:
        refused, failed: requests that intake refused; those that did not end by a stop or at
            their length.
        output_tokens_per_s: over the time from the first arrival to the last token.
        device_share: of that time, what the device was busy.
        cached_share: of all prompt tokens, those found in the cache at first admission.
    """

    requests: int
    refused: int
    failed: int
    elapsed_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    device_share: float
    ttft: Spread
    tpot: Spread
    itl: Spread
    retractions: int
    preemptions: int
    cached_share: float


def summarize(result: SimulationResult) -> Summary:
    """Cost: sorts every gap between tokens once."""
    done = completed(result.requests)
    first = [r for r in result.requests if r.tokens]
    inputs = sum(r.input_tokens for r in first)
    outputs = sum(r.tokens for r in first)
    elapsed_s = result.elapsed_s or math.nan
    return Summary(
        requests=len(result.requests) + len(result.refused),
        refused=len(result.refused),
        failed=len(result.requests) - len(done),
        elapsed_s=result.elapsed_s,
        output_tokens_per_s=outputs / elapsed_s,
        total_tokens_per_s=(inputs + outputs) / elapsed_s,
        device_share=result.busy_s / elapsed_s,
        ttft=Spread.of(r.ttft_s for r in first),
        tpot=Spread.of(r.tpot_s for r in first if r.tokens > 1),
        itl=Spread.of(result.gaps_s),
        retractions=result.statistics.counters.retractions,
        preemptions=result.statistics.counters.preemptions,
        cached_share=sum(r.cached_tokens for r in first) / max(inputs, 1),
    )


def share_within(result: SimulationResult, target_s: float, kind: str = "mixed") -> float:
    """The share of steps of a kind that took no longer than a target; nan without such steps."""
    times = [s for k, s in zip(result.steps.kinds, result.steps.seconds, strict=True) if k == kind]
    return sum(s <= target_s for s in times) / len(times) if times else math.nan


def markdown_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, left: tuple[int, ...] = (0,)
) -> str:
    """A table that is aligned as plain text too: figures to the right, columns `left` of words."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]

    def render(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * w if i in left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([render(lines[0]), render(rule), *map(render, lines[1:])])


def summary_table(named: dict[str, Summary]) -> str:
    """One column of figures per run, times in milliseconds."""
    figures: list[tuple[str, list[str]]] = []
    runs = list(named.values())

    def add(name: str, cells: Iterable[str]) -> None:
        figures.append((name, list(cells)))

    add("requests (refused, failed)", (f"{s.requests} ({s.refused}, {s.failed})" for s in runs))
    add("simulated time, s", (f"{s.elapsed_s:.1f}" for s in runs))
    add("output tokens/s", (f"{s.output_tokens_per_s:.0f}" for s in runs))
    add("total tokens/s", (f"{s.total_tokens_per_s:.0f}" for s in runs))
    add("device busy", (f"{s.device_share:.1%}" for s in runs))
    for label in ("ttft", "tpot", "itl"):
        spreads: list[Spread] = [getattr(s, label) for s in runs]
        for statistic in ("p50", "p99", "max"):
            cells = (f"{1e3 * getattr(spread, statistic):.1f}" for spread in spreads)
            add(f"{label.upper()} {statistic}, ms", cells)
    add("retractions / preemptions", (f"{s.retractions} / {s.preemptions}" for s in runs))
    add("prompt tokens from the cache", (f"{s.cached_share:.1%}" for s in runs))
    return markdown_table(["", *named], [[name, *cells] for name, cells in figures])
