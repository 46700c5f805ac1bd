"""What the report draws of a run: distributions, and what happened when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.percentiles import percentile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from server.bench.run import Run
    from server.bench.server_watch import Sample

    Points = list[tuple[float, float]]

MOST_POINTS = 200


def distribution(seconds: Sequence[float]) -> Points:
    """(milliseconds, share of values up to it in percent), at most MOST_POINTS + 1 of them."""
    if not seconds:
        return []
    ordered = sorted(seconds)
    steps = min(MOST_POINTS, max(1, len(ordered) - 1))
    return [(percentile(ordered, i / steps) * 1e3, 100 * i / steps) for i in range(steps + 1)]


def measures(run: Run) -> dict[str, list[float]]:
    """Every value of the complete answers by its name, in seconds."""
    good = [answer for answer in run.answers if answer.ok]
    return {
        "TTFT": [answer.ttft for answer in good],
        "ITL": [gap for answer in good for gap in answer.gaps],
        "TPOT": [answer.tpot for answer in good if answer.tpot is not None],
        "E2E": [answer.e2e for answer in good],
    }


def tokens_per_second(run: Run) -> Points:
    """(seconds, token chunks a second), over slices of equal length."""
    width = max(run.wall_s / MOST_POINTS, 0.1)
    counts = [0] * (int(run.wall_s / width) + 1)
    for answer in run.answers:
        for time in answer.times:
            counts[min(len(counts) - 1, max(0, int((time - run.origin) / width)))] += 1
    return [((number + 0.5) * width, count / width) for number, count in enumerate(counts)]


def in_flight(run: Run) -> Points:
    """(seconds, requests that the client waits for), at each change."""
    changes = [(answer.start, 1) for answer in run.answers]
    changes += [(answer.end, -1) for answer in run.answers]
    points, open_now = [], 0
    for time, change in sorted(changes):
        open_now += change
        points.append((time - run.origin, float(open_now)))
    return _thinned(points)


def of_server(run: Run, name: str) -> Points:
    """(seconds, a field of `Sample`), where the server told it."""
    return [
        (sample.time - run.origin, value)
        for sample in run.samples
        if (value := _field(sample, name)) is not None
    ]


def _field(sample: Sample, name: str) -> float | None:
    value: float | None = getattr(sample, name)
    return value


def _thinned(points: Iterable[tuple[float, float]]) -> Points:
    """At most MOST_POINTS, the largest value of each stretch."""
    every = list(points)
    stride = -(-len(every) // MOST_POINTS)
    if stride <= 1:
        return every
    stretches = (every[i : i + stride] for i in range(0, len(every), stride))
    return [max(stretch, key=lambda point: point[1]) for stretch in stretches]
