"""What a terminal shows: progress while a load runs, then its figures."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from server.bench.answer import Answer

MEASURES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")
COLUMNS = ("p50", "p90", "p99", "max")
LATE_MS = 50.0  # p99 of how late requests were sent, from which arrivals were not what was asked


class ProgressBar:
    """Finished requests on standard error, where that is a terminal."""

    def __init__(self, total: int, *, visible: bool) -> None:
        self._total, self._done, self._failed, self._visible = total, 0, 0, visible
        self._drawn = 0.0

    def advance(self, answer: Answer) -> None:
        self._done += 1
        self._failed += not answer.ok
        now = time.perf_counter()
        if self._visible and (now - self._drawn > 0.1 or self._done == self._total):
            self._drawn = now
            filled = 30 * self._done // self._total
            text = f"[{'#' * filled:<30}] {self._done}/{self._total}"
            text += f" ({self._failed} failed)" if self._failed else ""
            end = "\n" if self._done == self._total else ""
            print(f"\r{text}", end=end, file=sys.stderr, flush=True)


def table(summary: dict[str, Any]) -> str:
    """The figures of one run."""
    lines = [f"{'':<10}" + "".join(f"{column:>11}" for column in COLUMNS)]
    for measure in MEASURES:
        spread = summary[measure] or {}
        cells = (f"{spread[c]:>11.1f}" if c in spread else f"{'-':>11}" for c in COLUMNS)
        lines.append(f"{measure.removesuffix('_ms').upper() + ' ms':<10}" + "".join(cells))
    lines.append(
        f"{summary['completed']} of {summary['requests']} requests in {summary['wall_s']:.1f} s:"
        f" {summary['output_tokens_per_s']:.1f} output tokens/s,"
        f" {summary['total_tokens_per_s']:.1f} total tokens/s,"
        f" {summary['requests_per_s']:.2f} requests/s"
    )
    if "slo" in summary:
        share = summary["slo_attainment"]
        kept = "none could be judged" if share is None else f"{share:.1%} kept {summary['slo']} ms"
        lines.append(f"goodput {summary['goodput_per_s']:.2f} requests/s: {kept}")
    share, busiest = summary["client"]["cpu_share"], summary["client"]["busiest_share"]
    lines.append(f"this client took {share:.0%} of a core, {busiest:.0%} at its busiest")
    for kind, count in summary["errors"].items():
        lines.append(f"{count} failed: {summary['error_examples'][kind]}")
    lines += warnings(summary)
    return "\n".join(lines)


def warnings(summary: dict[str, Any]) -> list[str]:
    """What makes the figures say something else than they seem to."""
    found = []
    if summary["client"]["bottleneck"]:
        found.append(
            "the client itself was the bottleneck: times include its own work; use a faster"
            " machine, fewer streams, or several clients"
        )
    late = summary["late_ms"]
    if late is not None and late["p99"] > LATE_MS:
        found.append(f"requests were sent up to {late['max']:.0f} ms later than they should be")
    if summary["cut"]:
        found.append(f"{summary['cut']} requests were cut off by --max-seconds")
    if summary["short_answers"]:
        found.append(
            f"{summary['short_answers']} answers were shorter than asked for (--ignore-eos asks for"
            " full length)"
        )
    return [f"warning: {text}" for text in found]


def ratio_table(ratios: dict[str, dict[str, float]]) -> str:
    """The second server's figures as multiples of the first's."""
    lines = [f"{'second / first':<24}{'median':>9}{'min':>9}{'max':>9}"]
    for name, spread in ratios.items():
        cells = "".join(f"{spread[key]:>9.3f}" for key in ("median", "min", "max"))
        lines.append(f"{name:<24}{cells}")
    return "\n".join(lines)
