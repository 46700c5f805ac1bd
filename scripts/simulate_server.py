#!/usr/bin/env python
"""Deterministic simulation testing of the whole server: runs it in simulated worlds, and reports
what went wrong in them and whether it held.

    scripts/simulate_server.py --seeds 2000
    scripts/simulate_server.py --start 426 --seeds 1        one seed again
    scripts/simulate_server.py --forever --jobs 2           until it is stopped, or a seed fails

Each seed is a server with settings of its own on a virtual clock, its clients, and faults of the
device, the disk, the libraries, the network and the clients (tests/world). Every answer is known
beforehand. The exit status is 1 where a seed has shown something wrong.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.world.world import Report, run, settle


@dataclass
class Totals:
    """What all seeds together have done."""

    requests: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    steps: int = 0
    virtual_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    worlds: Counter[str] = field(default_factory=Counter)  # that had a fault of the kind
    answers: Counter[str] = field(default_factory=Counter)
    failed: list[int] = field(default_factory=list)

    def add(self, report: Report) -> None:
        self.requests.append(report.requests)
        self.kinds.append(len(report.faults))
        self.steps += report.steps
        self.virtual_s += report.virtual_s
        self.faults += report.faults
        self.worlds.update(report.faults.keys())
        self.answers += report.statuses
        if report.problems:
            self.failed.append(report.seed)

    def table(self, seconds: float) -> str:
        seeds = max(1, len(self.requests))
        lines = [
            "| seeds | requests | median of a seed | steps | virtual time | wall time | failed |",
            "|---:|---:|---:|---:|---:|---:|---:|",
            f"| {len(self.requests):,} | {sum(self.requests):,}"
            f" | {statistics.median(self.requests or [0]):g} | {self.steps:,}"
            f" | {self.virtual_s / 3600:.1f} h | {seconds:.0f} s ({seconds / seeds:.2f} s each)"
            f" | {len(self.failed)} |",
            "",
            f"Kinds of faults in a seed, median: {statistics.median(self.kinds or [0]):g}.",
            "",
            "| fault | times | seeds |",
            "|---|---:|---:|",
            *(
                f"| {kind} | {n:,} | {self.worlds[kind]:,} |"
                for kind, n in sorted(self.faults.items())
            ),
            "",
            "Answers: " + ", ".join(f"{kind} {n:,}" for kind, n in sorted(self.answers.items())),
        ]
        return "\n".join(lines)


def _reports(seeds: Iterable[int], jobs: int) -> Iterator[Report]:
    settle()
    if jobs == 1:
        yield from map(run, seeds)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(run, seeds, chunksize=1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--start", type=int, default=0, help="the first one (default 0)")
    parser.add_argument(
        "--forever", action="store_true", help="go on until a seed fails, or Ctrl-C"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    options = parser.parse_args()
    seeds = itertools.count(options.start)
    totals, started = Totals(), time.perf_counter()
    try:
        some = seeds if options.forever else itertools.islice(seeds, options.seeds)
        for report in _reports(some, options.jobs):
            totals.add(report)
            for problem in report.problems[:8]:
                print(f"seed {report.seed}: {problem[:600]}", flush=True)
            if options.forever and report.problems:
                break
    except KeyboardInterrupt:
        pass
    print(totals.table(time.perf_counter() - started))
    return 1 if totals.failed else 0


if __name__ == "__main__":
    sys.exit(main())
