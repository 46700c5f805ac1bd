#!/usr/bin/env python3
"""Re-runs a scheduler's recorded decisions without a model.

    scripts/replay.py FILE                              a trace written by `--record FILE`
    scripts/replay.py FILE --set chunked_prefill_size=64    the first decision this would change

Every input of the recorded run is fed to a fresh scheduler, and each decision is compared to the
byte. Exit status: 0 all the same, 1 a decision differs (it is named), 2 the trace cannot be used.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.errors import LoomserveError
from runtime.simulation.replay import replay
from runtime.simulation.trace import config_from, parse_override, read_trace


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, metavar="FILE", help="a trace written by --record")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a scheduler option to change; may be given several times",
    )
    args = parser.parse_args()
    try:
        overrides = dict(parse_override(text) for text in args.set)
        trace = read_trace(args.trace)
        start_s = time.perf_counter()
        report = replay(trace, config_from(trace.options, overrides))
    except LoomserveError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    took_s = time.perf_counter() - start_s
    if report.difference is not None:
        print(f"{args.trace}: {report.events} events and {report.steps} steps the same, then")
        print(report.difference)
        return 1
    print(
        f"{args.trace}: {report.events} events, {report.steps} steps, all the same ({took_s:.1f} s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
