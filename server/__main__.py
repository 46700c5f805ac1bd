"""`loomserve serve OPTIONS` and `python -m server OPTIONS`: the same options, one entry. Also
`loomserve fleet`, which starts several of them, `loomserve bench`, which loads one, `loomserve
doctor`, which tells what would be chosen on this machine, and `loomserve fetch-pyodide`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from server.args import parse_args

if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE = """\
usage: loomserve serve [OPTIONS]
       loomserve fleet --replicas N [OPTIONS]
       loomserve doctor [OPTIONS]
       loomserve fetch-pyodide [OPTIONS]
       loomserve bench --base-url URL [OPTIONS]

Options are listed by: loomserve serve --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server until it is told to stop; returns the exit status."""
    as_module = argv is None and sys.argv[0].endswith("__main__.py")
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] == "fleet":
        from server.fleet.options import parse_fleet

        fleet = parse_fleet(words[1:])
        from server.fleet.supervisor import run_fleet

        return run_fleet(fleet)
    if words and words[0] == "doctor":
        config = parse_args(words[1:], "loomserve doctor")
        from server.doctor import run_doctor

        return run_doctor(config)
    if words and words[0] == "fetch-pyodide":
        config = parse_args(words[1:], "loomserve fetch-pyodide")
        from server.simulator_files import run_fetch

        return run_fetch(config)
    if words and words[0] == "bench":
        from server.bench.command import main as bench

        return bench(words[1:])
    if words and words[0] == "serve":
        config = parse_args(words[1:], "loomserve serve")
    elif as_module or (words and words[0] not in ("-h", "--help")):
        config = parse_args(words)
    else:
        sys.stdout.write(USAGE)
        return 0 if words else 2
    # Imported after the arguments are known to be good: --help and a wrong option answer at once.
    from server.launcher import run

    return run(config)


if __name__ == "__main__":
    sys.exit(main())
