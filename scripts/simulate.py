#!/usr/bin/env python3
"""Simulates the scheduler: the real one, on a virtual clock, with modelled step times.

What is served (one of):
    scripts/simulate.py --requests 1000 --rate 20       synthetic; see --help for the shapes
    scripts/simulate.py --lengths FILE                  JSON lines: arrival_s, input_tokens,
                                                        output_tokens (more in workloads.py)
    scripts/simulate.py --live FILE                     a trace recorded by `--record FILE`

Where: --machine NAME, and --fit TRACE for step times fitted from a recorded trace (--live does
so with its own trace unless --machine is given).

What if: each `--what-if "chunked_prefill_size=64 schedule_policy=lpm"` is one more column, beside
the one of the options given with --set; --differences FILE writes what it changed per request,
and --html FILE everything as a page that needs no server: figures, steps, gaps, waits.

`--readme` runs the comparisons of docs/performance.md and prints their tables,
`--prefill-elsewhere` those of docs/prefill-elsewhere.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.errors import ConfigError, LoomserveError
from runtime.simulation.cost_fit import fit_cost_model
from runtime.simulation.disaggregation import goodput_table
from runtime.simulation.experiments import readme_tables
from runtime.simulation.live_run import LiveRun, read_live_run
from runtime.simulation.machines import MACHINE_NAMES, Machine, machine
from runtime.simulation.report import summarize, summary_table
from runtime.simulation.simulator import HostCost
from runtime.simulation.trace import Trace, parse_override, read_trace
from runtime.simulation.what_if import ObservedRun
from runtime.simulation.workloads import Arrival, Workload, read_length_trace
from scripts._report_file import write_report

if TYPE_CHECKING:
    from runtime.simulation.simulator import RequestStats, SimulationResult


def main() -> int:
    args = parse_arguments()
    try:
        if args.readme:
            print(readme_tables(progress=lambda text: print(text, file=sys.stderr)))
            return 0
        if args.prefill_elsewhere:
            print(goodput_table(progress=lambda text: print(text, file=sys.stderr)))
            return 0
        run(args)
    except (LoomserveError, OSError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    return 0


def run(args: argparse.Namespace) -> None:
    check_outputs(args)
    trace = read_trace(args.live) if args.live else None
    live = read_live_run(trace) if trace else None
    where = choose_machine(args, trace, live)
    arrivals = choose_arrivals(args, live)
    given = parse_options(args.set)
    columns = {"simulated": given}
    for text in args.what_if:
        columns[text] = {**given, **parse_options(text.split())}
    runs: dict[str, ObservedRun] = {}
    for name, options in columns.items():
        start_s = time.perf_counter()
        runs[name] = run = ObservedRun(
            where, arrivals, options, seed=args.seed, overlap=not args.disable_overlap
        )
        run.finish()
        took_s = time.perf_counter() - start_s
        print(f"{name}: {run.simulator.steps} steps in {took_s:.1f} s", file=sys.stderr)
    results = {name: run.simulator.result() for name, run in runs.items()}
    if not any(request.tokens for result in results.values() for request in result.requests):
        raise ConfigError(f"no request got a token: {why_none(results)}")
    summaries = {name: summarize(result) for name, result in results.items()}
    print(summary_table(summaries))
    if args.json:
        args.json.write_text(json.dumps({name: asdict(s) for name, s in summaries.items()}))
    if args.differences:
        write_differences(args.differences, results, live)
    if args.plot:
        plot(args.plot, results)
    if args.html:
        reports = [run.report(name) for name, run in runs.items()]
        write_report(args.html, "simulated runs", [load_in_words(args, arrivals)], reports)
        print(f"wrote {args.html}", file=sys.stderr)


def check_outputs(args: argparse.Namespace) -> None:
    """Before the runs, not after them. Raises: ConfigError."""
    for name in ("json", "differences", "plot", "html"):
        path: Path | None = getattr(args, name)
        if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            raise ConfigError(f"--{name} {path}: cannot be written")


def why_none(results: dict[str, SimulationResult]) -> str:
    """What the first one that was refused, or ended with a word, was told."""
    told = [reason for result in results.values() for reason in result.refused.values()]
    ends = [request.finish for result in results.values() for request in result.requests]
    told += [end.message for end in ends if end and end.message]
    return told[0] if told else "all ended before"


def choose_machine(args: argparse.Namespace, trace: Trace | None, live: LiveRun | None) -> Machine:
    """The named machine, with the options and the measured costs of a recorded trace if given."""
    where = machine(args.machine or MACHINE_NAMES[0])
    if trace is not None:
        where = replace(where, options=trace.options)
    measured = read_live_run(read_trace(args.fit)) if args.fit else live
    if measured is not None and (args.fit or not args.machine):
        fit = fit_cost_model(measured.step_times)
        print(
            f"costs fitted to {fit.steps} steps ({fit.outliers} outliers,"
            f" median error {fit.error:.1%}): {fit.model}",
            file=sys.stderr,
        )
        # A trace does not tell the host's time from waiting for the device: taken as hidden.
        where = replace(where, cost=fit.model, host=HostCost())
    return where


def choose_arrivals(args: argparse.Namespace, live: LiveRun | None) -> list[Arrival]:
    if live is not None:
        return live.arrivals
    if args.lengths:
        return read_length_trace(args.lengths, seed=args.seed)
    return Workload(
        requests=args.requests,
        rate=args.rate,
        burst=args.burst,
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        prefix_groups=args.prefix_groups,
        prefix_tokens=args.prefix_tokens,
        cold_share=args.cold_share,
        max_new_factor=args.max_new_factor,
        seed=args.seed,
    ).arrivals()


def load_in_words(args: argparse.Namespace, arrivals: list[Arrival]) -> str:
    """What was served and where, for the head of a report."""
    source = args.live or args.lengths
    tokens = sum(len(arrival.input_ids) for arrival in arrivals)
    costs = args.fit or args.machine or args.live or MACHINE_NAMES[0]
    origin = f"of {source}" if source else "from a seed"
    return f"{len(arrivals):,} requests {origin}, {tokens:,} prompt tokens; step times of {costs}."


def parse_options(texts: list[str]) -> dict[str, Any]:
    return dict(parse_override(text) for text in texts)


def write_differences(
    path: Path, results: dict[str, SimulationResult], live: LiveRun | None
) -> None:
    """One JSON line per request: its figures in every column, the live run's first."""
    columns = {name: {r.request_id: r for r in result.requests} for name, result in results.items()}
    if live is not None:
        columns = {"live": live.stats, **columns}
    with path.open("w", encoding="utf-8") as lines:
        for request_id in next(iter(columns.values())):
            line: dict[str, Any] = {"request_id": request_id}
            for name, requests in columns.items():
                if request_id in requests:
                    line[name] = request_figures(requests[request_id])
            lines.write(json.dumps(line) + "\n")


def request_figures(stats: RequestStats) -> dict[str, Any]:
    seen = stats.tokens > 0
    return {
        "ttft_s": round(stats.ttft_s, 6) if seen else None,
        "tpot_s": round(stats.tpot_s, 6) if seen else None,
        "longest_gap_s": round(stats.longest_gap_s, 6),
        "tokens": stats.tokens,
        "retractions": stats.retractions,
        "finish": stats.finish.reason.value if stats.finish else None,
    }


def plot(path: Path, results: dict[str, SimulationResult]) -> None:
    """Cumulated shares of requests by TTFT and TPOT, and of gaps by length, a line per column."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib (pip install -e '.[plot]'): {error}") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), constrained_layout=True)
    for name, result in results.items():
        seen = [r for r in result.requests if r.tokens]
        for axis, values in zip(
            axes,
            ([r.ttft_s for r in seen], [r.tpot_s for r in seen if r.tokens > 1], result.gaps_s),
            strict=True,
        ):
            ordered = sorted(values)
            # At most 2,000 points: millions of gaps draw no better.
            kept = ordered[:: max(math.ceil(len(ordered) / 2000), 1)] + ordered[-1:]
            shares = [(i + 1) / len(kept) for i in range(len(kept))]
            axis.plot([1e3 * value for value in kept], shares, label=name)
    for axis, title in zip(axes, ("time to first token", "time per token", "gap"), strict=True):
        axis.set(xlabel=f"{title}, ms", xscale="log", ylabel="share", ylim=(0, 1.01))
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=120)
    print(f"wrote {path}", file=sys.stderr)


def span(text: str) -> tuple[int, int]:
    """`100:1024` or `512`."""
    low, _, high = text.partition(":")
    return int(low), int(high or low)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--lengths", type=Path, metavar="FILE", help="requests from a file of lengths")
    add("--live", type=Path, metavar="FILE", help="requests from a recorded trace")
    add("--fit", type=Path, metavar="FILE", help="step times fitted from a recorded trace")
    add("--machine", choices=MACHINE_NAMES, help=f"default {MACHINE_NAMES[0]}")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a scheduler option")
    add("--what-if", action="append", default=[], metavar="OPTIONS", help="one more column")
    add("--requests", type=int, default=1000)
    add("--rate", type=float, default=0.0, help="arrivals (bursts) a second; 0: all at once")
    add("--burst", type=int, default=1, help="requests that arrive together")
    add("--input-tokens", type=span, default=(100, 1024), metavar="A:B", help="uniform")
    add("--output-tokens", type=span, default=(100, 1024), metavar="A:B", help="uniform")
    add("--prefix-groups", type=int, default=0, help="number of common prefixes")
    add("--prefix-tokens", type=int, default=0, help="length of a common prefix")
    add("--cold-share", type=float, default=0.0, help="share of requests without a prefix")
    add("--max-new-factor", type=float, default=1.0, help="max_new_tokens over the true length")
    add("--seed", type=int, default=0)
    add("--disable-overlap", action="store_true", help="plan only when nothing runs")
    add("--plot", type=Path, metavar="FILE.png")
    add("--differences", type=Path, metavar="FILE.jsonl", help="figures per request")
    add("--html", type=Path, metavar="FILE", help="a page with everything, which needs no server")
    add("--json", type=Path, metavar="FILE")
    add("--readme", action="store_true", help="print the comparisons of docs/performance.md")
    add("--prefill-elsewhere", action="store_true", help="print the goodput of two devices")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
