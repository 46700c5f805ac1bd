"""One HTML file that shows runs: no script, nothing from the network, all text escaped."""

from __future__ import annotations

import base64
import hashlib
import time
from dataclasses import dataclass, field
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

from server.bench import curves
from server.bench.charts import Series, line_chart
from server.bench.compare import FIGURES, figure, ratios

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from server.bench.run import Run
    from server.bench.search import RateSearch
    from server.bench.slo import Slo

    Curve = Callable[[Run], list[tuple[float, float]]]

STYLE = """
:root { color-scheme: light dark; --ink: #1d2230; --paper: #fff; --line: #d5d9e2;
  --c0: #2262c9; --c1: #c8501e; --c2: #1b8a5a; --c3: #8a3fb0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ee; --paper: #14171f; --line: #343a48;
  --c0: #7fb0ff; --c1: #ff9a66; --c2: #63d3a0; --c3: #d39af0; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2rem; } table { border-collapse: collapse; }
td, th { padding: .2rem .8rem; border-bottom: 1px solid var(--line); text-align: right; }
td:first-child, th:first-child { text-align: left; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
svg text { font-size: 11px; fill: var(--ink); } .g { stroke: var(--line); }
polyline { fill: none; stroke-width: 2; } .warning { color: var(--c1); font-weight: 600; }
.s0 { stroke: var(--c0); } .s1 { stroke: var(--c1); } .s2 { stroke: var(--c2); }
.s3 { stroke: var(--c3); } [class^=k] { display: inline-block; width: .8em; height: .8em; }
.k0 { background: var(--c0); } .k1 { background: var(--c1); } .k2 { background: var(--c2); }
.k3 { background: var(--c3); }
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """All that one command measured.

    Args:
        runs: with the name of each.
        pairs: of two servers, where these were compared: the runs, two by two.
        search: for the highest rate, where that was looked for.
    """

    runs: Sequence[tuple[str, Run]]
    slo: Slo | None = None
    pairs: Sequence[tuple[Run, Run]] = ()
    search: RateSearch | None = None
    notes: list[str] = field(default_factory=list)

    def ratios(self) -> dict[str, dict[str, float]]:
        """The ratios of the second server to the first; empty if none were compared."""
        return ratios([(a.summary(self.slo), b.summary(self.slo)) for a, b in self.pairs])


def html_report(measured: Measured, version: str) -> str:
    """The whole page."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    body = "".join(
        [
            f"<p>loomserve {escape(version)}, {made}</p>",
            *(f'<p class="warning">{escape(note)}</p>' for note in measured.notes),
            _comparison(measured),
            _search(measured),
            _figures(measured),
            _charts(measured),
        ]
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Load report</title><style>{STYLE}</style></head>"
        f"<body><h1>Load report</h1>{body}</body></html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Cells are escaped."""
    lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"]
    for row in rows:
        cells = "".join(f"<td>{escape(_shown(cell))}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {count}" for name, count in value.items()) or "none"
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1000 else str(value)


def _comparison(measured: Measured) -> str:
    if not measured.pairs:
        return ""
    one, other = measured.pairs[0]
    rows = [
        (name, spread["median"], f"{spread['min']:.3g} to {spread['max']:.3g}", spread["pairs"])
        for name, spread in measured.ratios().items()
    ]
    told = f"{other.target.base_url} as a multiple of {one.target.base_url}, pair by pair."
    head = ("figure", "median ratio", "range", "pairs")
    return f"<h2>Ratios</h2><p>{escape(told)}</p>{table(head, rows)}"


def _search(measured: Measured) -> str:
    search = measured.search
    if search is None:
        return ""
    rows = [(f"{rate:.3f}", "kept" if kept else "missed") for rate, kept in search.trials]
    return (
        f"<h2>Highest rate</h2><p>{escape(rate_found(search))}</p>"
        f"{table(('requests/s', 'the SLO was'), rows)}"
    )


def rate_found(search: RateSearch) -> str:
    """The outcome in a sentence."""
    if search.highest is None:
        return f"The SLO was missed at every rate tried, down to {search.lowest_missed:.3g}/s."
    if search.lowest_missed is None:
        return f"The SLO was kept at every rate tried, up to {search.highest:.3g}/s."
    return f"The SLO is kept at {search.highest:.3g}/s and missed at {search.lowest_missed:.3g}/s."


def _figures(measured: Measured) -> str:
    summaries = [(name, run.summary(measured.slo)) for name, run in measured.runs]
    paths = ["completed", "requests", "cut", "wall_s", "prompt_tokens", "cached_tokens"]
    paths += ["output_tokens", *FIGURES, "late_ms.p99", "client.cpu_share", "client.busiest_share"]
    if measured.slo is not None:
        paths.append("slo_attainment")
    rows: list[Sequence[Any]] = [
        ("server", *(summary["base_url"] for _, summary in summaries)),
        ("model", *(summary["model"] for _, summary in summaries)),
        ("load", *(_load(summary["load"]) for _, summary in summaries)),
        ("errors", *(summary["errors"] for _, summary in summaries)),
    ]
    rows += [(path, *(figure(summary, path) for _, summary in summaries)) for path in paths]
    slo = "" if measured.slo is None else f"<p>SLO, in ms: {escape(str(measured.slo))}</p>"
    return f"<h2>Figures</h2>{slo}{table(('', *(name for name, _ in summaries)), rows)}"


def _load(load: dict[str, Any]) -> str:
    known = {name: value for name, value in load.items() if value is not None}
    return ", ".join(f"{name} {value}" for name, value in known.items())


def _charts(measured: Measured) -> str:
    figures = []
    for name in ("TTFT", "ITL", "TPOT", "E2E"):
        drawn = _drawn(measured, partial(_distribution, name))
        figures.append((f"{name}: share of values up to a time", drawn, "ms", "percent", True))
    for title, curve, unit in (
        ("Tokens per second", curves.tokens_per_second, "tokens/s"),
        ("Requests under way, as the client sees it", curves.in_flight, "requests"),
        ("Requests running, as the server says", _server("running"), "requests"),
        ("Requests waiting, as the server says", _server("waiting"), "requests"),
        ("KV in use, as the server says", _server("kv_usage"), "share"),
    ):
        figures.append((title, _drawn(measured, curve), "seconds", unit, False))
    drawn_figures = "".join(
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f"{line_chart(series, x, y, log_x=log)}</figure>"
        for title, series, x, y, log in figures
    )
    return f'<h2>Distributions and times</h2><div class="charts">{drawn_figures}</div>'


def _drawn(measured: Measured, curve: Curve) -> list[Series]:
    drawn = measured.runs[-2:]  # more lines than two say less
    return [Series(name, points) for name, run in drawn if (points := curve(run))]


def _distribution(measure: str, run: Run) -> list[tuple[float, float]]:
    return curves.distribution(curves.measures(run)[measure])


def _server(name: str) -> Curve:
    return lambda run: curves.of_server(run, name)
