"""Line charts as SVG text: no script, nothing fetched, colours from the page's style."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 40
TICKS = 6
LOG_FROM = 30.0  # largest over smallest x from which an axis of times is logarithmic


@dataclass(frozen=True, slots=True)
class Series:
    """One line. Args: points: (x, y), in order of x."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axis:
    """Values to places. Args: low, high: the ends of the axis; begin, end: where they are drawn."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        scale: Callable[[float], float] = math.log if self.log else float
        share = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return round(self.begin + share * (self.end - self.begin), 1)

    def ticks(self) -> list[float]:
        """Round values on the axis: of 1, 2 and 5 times powers of ten."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if last - first <= 3 else (1,)
            values = [m * 10.0**power for power in range(first, last + 1) for m in steps]
            return [value for value in values if self.low <= value <= self.high]
        raw = (self.high - self.low) / TICKS
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
        first = math.ceil(self.low / step)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def line_chart(series: Sequence[Series], x_label: str, y_label: str, *, log_x: bool = False) -> str:
    """An SVG element; a sentence where there is nothing to draw. log_x: where the values ask for
    it."""
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    if not xs:
        return "<p>Nothing to draw.</p>"
    low, high = min(xs), max(xs)
    log = log_x and low > 0 and high / low >= LOG_FROM
    if not log:
        low = min(low, 0.0)
    x_axis = Axis(low, high if high > low else low + 1, LEFT, WIDTH - RIGHT, log)
    y_axis = Axis(0.0, max(ys) * 1.05 or 1.0, HEIGHT - BOTTOM, TOP)
    parts = [*_grid(x_axis, y_axis), *_labels(x_label, y_label)]
    for number, one in enumerate(series):
        places = " ".join(f"{x_axis.place(x)},{y_axis.place(y)}" for x, y in one.points)
        parts.append(f'<polyline class="s{number % 4}" points="{places}"/>')
    label = escape(f"{y_label} by {x_label}: " + ", ".join(one.name for one in series))
    inside = "".join(parts)
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{inside}</svg>'
    return svg + _legend(series)


def _grid(x_axis: Axis, y_axis: Axis) -> list[str]:
    bottom = HEIGHT - BOTTOM
    parts = []
    for value in x_axis.ticks():
        x = x_axis.place(value)
        parts.append(f'<line class="g" x1="{x}" y1="{TOP}" x2="{x}" y2="{bottom}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')
    for value in y_axis.ticks():
        y = y_axis.place(value)
        parts.append(f'<line class="g" x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value:g}</text>')
    return parts


def _labels(x_label: str, y_label: str) -> list[str]:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return [
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{escape(x_label)}</text>",
        f'<text x="12" y="{middle}" text-anchor="middle" transform="rotate(-90 12 {middle})">'
        f"{escape(y_label)}</text>",
    ]


def _legend(series: Sequence[Series]) -> str:
    if len(series) < 2:
        return ""
    keys = (
        f'<span class="k{number % 4}"></span> {escape(one.name)}'
        for number, one in enumerate(series)
    )
    return f'<p class="legend">{" &nbsp; ".join(keys)}</p>'
