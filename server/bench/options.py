"""The command line of `loomserve bench`."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from runtime.errors import ConfigError
from server.bench import arrivals, workloads
from server.bench.arrivals import Arrivals
from server.bench.run import Load
from server.bench.slo import Slo
from server.bench.target import PATHS, Target
from server.bench.words import Lengths
from server.bench.workloads import Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

ABOUT = """\
Loads an OpenAI-compatible server and shows what its clients would see.

    loomserve bench --requests 200 --concurrency 16
    loomserve bench --rate 4 --prompt-tokens lognormal:400:600 --slo ttft=500,tpot=60
    loomserve bench --workload mooncake --file trace.jsonl --speed 2 --html report.html
    loomserve bench --rate 2 --compare http://127.0.0.1:8001
    loomserve bench --slo ttft=500,tpot=60 --find-rate

A closed loop (--concurrency N) has N clients that each ask again as soon as they are answered. In
an open one (--rate R) requests arrive at R a second, whatever the server does. A run ends after
--requests requests or --max-seconds seconds. The exit status is 1 where a request failed, 2 where
none could be sent.
"""


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for.

    Args:
        other: a second server, to be compared with the first.
        pairs: of runs, for that.
        rate_trials: of the search for the highest rate that keeps the SLO; 0: none is looked for.
        attainment: share of the requests that must keep it.
        json: "-" for the last line of the output, or a file.
        output: a file of JSON lines, one for each request.
    """

    target: Target
    load: Load
    slo: Slo | None
    other: Target | None
    pairs: int
    rate_trials: int
    attainment: float
    json: str | None
    output: Path | None
    html: Path | None


def parse(argv: Sequence[str], prog: str = "loomserve bench") -> Options:
    """Ends the process with status 2 and a sentence where it cannot be."""
    parser = _parser(prog)
    given = parser.parse_args(argv)
    try:
        return _options(given)
    except ConfigError as error:
        parser.error(str(error))


class _Parser(argparse.ArgumentParser):
    """Tells of a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists all options\n")


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_server(parser.add_argument_group("the server").add_argument)
    _add_load(parser.add_argument_group("what is asked").add_argument)
    _add_timing(parser.add_argument_group("when").add_argument)
    _add_results(parser.add_argument_group("what is made of it").add_argument)
    return parser


def _add_server(add: Any) -> None:
    add("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="with or without /v1")
    add("--model", default="", help="else the first that /v1/models lists")
    add("--endpoint", choices=tuple(PATHS), default="completions")
    add("--api-key", metavar="KEY", help="sent as a bearer token")
    add("--ignore-eos", action="store_true", help="ask for answers of full length")
    add("--temperature", type=float, default=0.0)
    add("--extra", metavar="JSON", help="an object of more fields for each request")
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds for one request (600)")
    add("--keep-alive", action="store_true", help="reuse connections")


def _add_load(add: Any) -> None:
    spec = "N, LOW:HIGH, ~MEAN (exponential) or lognormal:MEAN:SD"
    add("--workload", default="random", metavar="KIND", help=", ".join(workloads.KINDS))
    add("--file", type=Path, metavar="FILE", help="of a workload that is read")
    add("--requests", type=int, default=100, metavar="N", help="at most (100)")
    add("--prompt-tokens", default="64:256", metavar="SPEC", help=spec)
    add("--output-tokens", default="64", metavar="SPEC", help="the same, for max_tokens")
    add("--prefix-tokens", type=int, default=1024, metavar="N", help="of shared-prefix (1024)")
    add("--prefix-groups", type=int, default=1, metavar="N", help="different prefixes (1)")
    add("--turns", type=int, help="of a conversation at most (multi-turn 4, sharegpt 1)")
    add(
        "--context-length",
        type=int,
        default=0,
        metavar="N",
        help="leave out requests of a file that are longer (0: none)",
    )
    add("--seed", type=int, default=1, help="of words, lengths and arrivals (1)")


def _add_timing(add: Any) -> None:
    add("--concurrency", type=int, metavar="N", help="clients of a closed loop (8)")
    add(
        "--rate",
        type=float,
        metavar="R",
        help="requests (or conversations) a second of an open loop",
    )
    add("--arrivals", default="poisson", metavar="KIND", help=", ".join(arrivals.KINDS))
    add("--burst-size", type=int, default=8, metavar="N", help="requests at once, of burst (8)")
    add("--ramp-to", type=float, metavar="R", help="the rate at the end, of ramp")
    add("--speed", type=float, default=1.0, metavar="X", help="a file's times pass X times as fast")
    add("--max-seconds", type=float, default=600.0, metavar="S", help="of one run (600)")


def _add_results(add: Any) -> None:
    add("--slo", metavar="M=MS,...", help="bounds on ttft, tpot, itl (largest gap) or e2e, in ms")
    add("--compare", metavar="URL", help="a second server, loaded in turn with the first")
    add("--pairs", type=int, metavar="N", help="of runs, with --compare (3)")
    add("--find-rate", action="store_true", help="look for the highest rate that keeps the SLO")
    add("--trials", type=int, default=10, metavar="N", help="runs of that search at most (10)")
    add(
        "--attainment",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="of the requests that must keep the SLO, in that search (0.9)",
    )
    add("--json", nargs="?", const="-", metavar="FILE", help="figures as the last line, or a file")
    add("--output", type=Path, metavar="FILE", help="a line of JSON for each request")
    add("--html", type=Path, metavar="FILE", help="one page with charts")


def _options(given: argparse.Namespace) -> Options:
    for name in ("concurrency", "timeout", "max_seconds", "pairs", "trials"):
        value = getattr(given, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: must be above 0")
    if not 0 < given.attainment <= 1:
        raise ConfigError(f"--attainment {given.attainment:g}: must be above 0 and at most 1")
    if given.concurrency and given.rate:
        raise ConfigError("--concurrency: does not go with --rate; a loop is closed or open")
    if given.find_rate and (given.slo is None or given.compare or given.concurrency):
        raise ConfigError("--find-rate: needs --slo, and goes without --compare and --concurrency")
    if given.find_rate and given.arrivals == "ramp":
        raise ConfigError("--find-rate: needs arrivals of one rate; a ramp has many")
    if given.pairs is not None and not given.compare:
        raise ConfigError("--pairs: goes with --compare")
    if given.file is not None and not os.access(given.file, os.R_OK):
        raise ConfigError(f"--file {given.file}: cannot be read")
    for name in ("output", "html", "json"):
        _check_writable(name, getattr(given, name))
    target = _target(given)
    return Options(
        target=target,
        load=_load(given),
        slo=None if given.slo is None else Slo.parse(given.slo),
        other=None if given.compare is None else _target(given, given.compare),
        pairs=given.pairs or 3,
        rate_trials=given.trials if given.find_rate else 0,
        attainment=given.attainment,
        json=given.json,
        output=given.output,
        html=given.html,
    )


def _check_writable(option: str, path: Path | str | None) -> None:
    """Before the run, not after it. Raises: ConfigError."""
    if path is None or path == "-":
        return
    folder = Path(path).parent
    if not os.access(folder, os.W_OK) or Path(path).is_dir():
        raise ConfigError(f"--{option} {path}: cannot be written")


def _target(given: argparse.Namespace, url: str | None = None) -> Target:
    extra: dict[str, Any] = {"temperature": given.temperature}
    if given.extra is not None:
        try:
            fields = json.loads(given.extra)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            raise ConfigError(f"--extra {given.extra!r}: must be a JSON object")
        extra |= fields
    base_url = given.base_url if url is None else url
    if not re.match(r"https?://[^/]", base_url):
        option = "--base-url" if url is None else "--compare"
        raise ConfigError(f"{option} {base_url!r}: must be http:// or https:// and a host")
    return Target(
        base_url=base_url,
        model=given.model,
        endpoint=given.endpoint,
        extra=extra,
        api_key=given.api_key,
        timeout_s=given.timeout,
        keep_alive=given.keep_alive,
        ignore_eos=given.ignore_eos,
    )


def _load(given: argparse.Namespace) -> Load:
    workload = Workload(
        kind=given.workload,
        requests=given.requests,
        prompt=_lengths(given, "prompt_tokens"),
        output=_lengths(given, "output_tokens"),
        prefix_tokens=given.prefix_tokens,
        prefix_groups=given.prefix_groups,
        turns=given.turns or (1 if given.workload == "sharegpt" else 4),
        file=given.file,
        context_length=given.context_length,
        speed=given.speed,
    )
    rate = given.rate
    if rate is None and (given.find_rate or given.arrivals != "poisson"):
        rate = 1.0
    when = None
    if rate is not None:
        when = Arrivals(given.arrivals, rate, given.burst_size, given.ramp_to)
    concurrency = 0 if when or workload.timed else 8
    return Load(workload, when, given.concurrency or concurrency, given.max_seconds, given.seed)


def _lengths(given: argparse.Namespace, name: str) -> Lengths:
    try:
        return Lengths(getattr(given, name))
    except ConfigError as error:
        raise ConfigError(f"--{name.replace('_', '-')} {error}") from None
