"""`loomserve bench`: measures, and shows what was measured."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import uvloop

from runtime.errors import ConfigError
from server.bench import console
from server.bench.compare import in_turn
from server.bench.options import parse
from server.bench.report import Measured, html_report, rate_found
from server.bench.run import run_load
from server.bench.search import highest_rate
from server.version import version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.bench.options import Options
    from server.bench.run import Load, Run
    from server.bench.target import Target


def main(argv: Sequence[str], prog: str = "loomserve bench") -> int:
    """Returns the exit status: 0, 1 where a request failed, 2 where none could be sent."""
    options = parse(argv, prog)
    try:
        measured = uvloop.run(measure(options))
        write_files(options, measured)
    except (aiohttp.ClientError, ConfigError, OSError, TimeoutError) as error:
        print(f"{prog}: {error or type(error).__name__}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    answers = [answer for _, run in measured.runs for answer in run.answers]
    if not answers:
        print(f"{prog}: nothing was asked within the time", file=sys.stderr)
        return 2
    return 1 if any(answer.error for answer in answers) else 0


async def measure(options: Options) -> Measured:
    """Runs what was asked for, and says on the way what came out.

    Raises: aiohttp.ClientError: a server does not answer. ConfigError: a file is wrong.
    """
    if options.other is not None:
        return await _compared(options, options.other)
    if options.rate_trials:
        return await _searched(options)
    run = await _run(options, options.target, options.load)
    summary = _told(options, "", run)
    return Measured([("run", run)], options.slo, notes=console.warnings(summary))


async def _run(options: Options, target: Target, load: Load) -> Run:
    bar = console.ProgressBar(load.workload.requests, visible=sys.stderr.isatty())
    return await run_load(target, load, bar.advance)


def _told(options: Options, title: str, run: Run) -> dict[str, Any]:
    summary = run.summary(options.slo)
    print(f"{title}\n" * bool(title) + console.table(summary), flush=True)
    return summary


async def _compared(options: Options, other: Target) -> Measured:
    """Every pair has words and arrivals of its own; both of its runs have the same."""
    notes: list[str] = []

    async def one(target: Target, name: str, pair: int) -> Run:
        load = replace(options.load, seed=options.load.seed + pair)
        run = await _run(options, target, load)
        title = f"{name}, pair {pair + 1}"
        notes.extend(f"{title}: {note}" for note in console.warnings(_told(options, title, run)))
        return run

    pairs = await in_turn(
        options.pairs,
        lambda pair: one(options.target, "first", pair),
        lambda pair: one(other, "second", pair),
    )
    runs = [
        (f"{name}, pair {number}", run)
        for number, pair in enumerate(pairs, 1)
        for name, run in zip(("first", "second"), pair, strict=True)
    ]
    measured = Measured(runs, options.slo, pairs, notes=notes)
    print(console.ratio_table(measured.ratios()))
    return measured


async def _searched(options: Options) -> Measured:
    """Kept are the runs at the highest rate that kept the SLO and at the lowest that missed it."""
    assert options.slo is not None
    assert options.load.arrivals is not None
    arrivals = options.load.arrivals
    tried: dict[float, Run] = {}

    async def keeps(rate: float) -> bool:
        # Other words each time: what one trial has cached must not help the next.
        load = replace(
            options.load,
            arrivals=replace(arrivals, rate=rate),
            seed=options.load.seed + len(tried),
        )
        tried[rate] = run = await _run(options, options.target, load)
        share = _told(options, f"{rate:.3f} requests/s", run)["slo_attainment"]
        return share is not None and share >= options.attainment

    search = await highest_rate(keeps, arrivals.rate, options.rate_trials)
    print(rate_found(search))
    bounds = (("kept", search.highest), ("missed", search.lowest_missed))
    runs = [(f"{name}, {rate:.3f}/s", tried[rate]) for name, rate in bounds if rate is not None]
    return Measured(runs, options.slo, search=search)


def write_files(options: Options, measured: Measured) -> None:
    """What was asked for beside the text. Raises: OSError."""
    if options.output is not None:
        lines = [
            json.dumps({"run": name, **answer.record(run.origin)})
            for name, run in measured.runs
            for answer in run.answers
        ]
        options.output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    if options.html is not None:
        options.html.write_text(html_report(measured, version()), encoding="utf-8")
    if options.json is not None:
        _write_json(options.json, as_json(measured))


def as_json(measured: Measured) -> dict[str, Any]:
    """One run's summary; of several, theirs with what was made of them."""
    summaries = {name: run.summary(measured.slo) for name, run in measured.runs}
    if measured.pairs:
        return {"runs": summaries, "ratios": measured.ratios()}
    if measured.search is not None:
        search = measured.search
        return {
            "runs": summaries,
            "highest_rate": search.highest,
            "lowest_missed_rate": search.lowest_missed,
            "trials": [{"rate": rate, "kept": kept} for rate, kept in search.trials],
        }
    return next(iter(summaries.values()))


def _write_json(where: str, record: dict[str, Any]) -> None:
    line = json.dumps(record)
    if where == "-":
        print(line)
        return
    Path(where).write_text(line + "\n", encoding="utf-8")
