#!/usr/bin/env python3
"""Loads an OpenAI-compatible server and prints what its clients would see.

    scripts/load_test.py --base-url http://127.0.0.1:8000 --requests 200 --concurrency 16
    scripts/load_test.py --base-url http://127.0.0.1:8000 --rate 4 --prompt-tokens 64:512

Closed loop (`--concurrency N`): N clients that each ask again as soon as they are answered.
Open loop (`--rate R`): requests arrive as a Poisson process of R per second. Prompts are random
common words, about a token each; the seed goes into them, so another seed meets no warm cache.
What TTFT, ITL, TPOT and E2E mean stands at the head of _client.py. With `--json` a line of JSON
comes last (or goes to a file), with the workload beside the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts._client import (
    Answer,
    Target,
    ask,
    closed_loop,
    first_model,
    open_loop,
    open_session,
    random_words,
    summarize,
)

MEASURES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")
COLUMNS = ("p50", "p90", "p99", "max")


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts: "128" always 128, "64:256" uniform, "~128" exponential."""

    text: str

    def __post_init__(self) -> None:
        try:
            parts = [int(part) for part in self.text.removeprefix("~").split(":")]
        except ValueError:
            parts = []
        if not 1 <= len(parts) <= (1 if self.text[:1] == "~" else 2) or parts != sorted(parts):
            raise ValueError(f"{self.text!r}: must be N, LOW:HIGH or ~MEAN")
        if parts[0] < 1:
            raise ValueError(f"{self.text!r}: must be at least 1 token")

    def draw(self, rng: random.Random) -> int:
        if self.text.startswith("~"):
            return max(1, round(rng.expovariate(1 / int(self.text[1:]))))
        low, _, high = self.text.partition(":")
        return rng.randint(int(low), int(high or low))


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent. Exactly one of `concurrency` and `rate` rules when."""

    requests: int
    concurrency: int | None
    rate: float | None
    prompt_tokens: str
    output_tokens: str
    seed: int


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


async def run_load(target: Target, load: Load, bar: ProgressBar) -> dict[str, Any]:
    """Sends the load. Returns: `summarize`'s record with the workload under "load"."""
    rng = random.Random(load.seed)
    prompt, output = Lengths(load.prompt_tokens), Lengths(load.output_tokens)
    async with open_session(target) as session:
        if not target.model:
            target = replace(target, model=await first_model(session, target))

        async def call(text: str, max_tokens: int) -> Answer:
            answer = await ask(session, target, text, max_tokens)
            bar.advance(answer)
            return answer

        def calls() -> Iterator[Any]:
            for _ in range(load.requests):
                text = random_words(rng, prompt.draw(rng))
                max_tokens = output.draw(rng)
                yield lambda text=text, max_tokens=max_tokens: call(text, max_tokens)

        start = time.perf_counter()
        if load.rate is None:
            answers = await closed_loop(calls(), load.concurrency or 1)
        else:
            answers = await open_loop(calls(), load.rate, random.Random(load.seed + 1))
        summary = summarize(answers, time.perf_counter() - start)
    return {"model": target.model, "load": asdict(load), **summary}


def table(summary: dict[str, Any]) -> str:
    """The figures as text for a terminal."""
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
    for text, count in summary["errors"].items():
        lines.append(f"{count} failed: {text}")
    return "\n".join(lines)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="with or without /v1")
    add("--model", default="", help="else the first that /v1/models lists")
    add("--endpoint", choices=("completions", "chat"), default="completions")
    add("--requests", type=int, default=100)
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--concurrency", type=int, help="clients of a closed loop (8)")
    when.add_argument("--rate", type=float, help="requests per second of an open loop")
    add("--prompt-tokens", default="64:256", metavar="SPEC", help="N, LOW:HIGH or ~MEAN")
    add("--output-tokens", default="64", metavar="SPEC", help="the same, for max_tokens")
    add("--ignore-eos", action="store_true", help="each answer has its full length")
    add("--temperature", type=float, default=0.0)
    add("--api-key", help="sent as a bearer token")
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds for one request")
    add("--keep-alive", action="store_true", help="reuse connections")
    add("--seed", type=int, default=1)
    add("--json", nargs="?", const="-", metavar="FILE", help="also as JSON (last line, or a file)")
    options = parser.parse_args(argv)
    for name in ("prompt_tokens", "output_tokens"):
        try:
            Lengths(getattr(options, name))
        except ValueError as error:
            parser.error(f"--{name.replace('_', '-')} {error}")
    for name in ("requests", "concurrency", "rate"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name} {value}: must be above 0")
    return options


def main(argv: list[str]) -> int:
    """Returns the exit status: 0, 1 where a request failed, 2 where no server answers."""
    options = parse(argv)
    extra: dict[str, Any] = {"temperature": options.temperature}
    if options.ignore_eos:
        extra["ignore_eos"] = True
    target = Target(
        options.base_url,
        options.model,
        options.endpoint,
        extra,
        options.api_key,
        options.timeout,
        options.keep_alive,
    )
    concurrency = None if options.rate else options.concurrency or 8
    load = Load(
        options.requests,
        concurrency,
        options.rate,
        options.prompt_tokens,
        options.output_tokens,
        options.seed,
    )
    bar = ProgressBar(load.requests, visible=sys.stderr.isatty())
    try:
        summary = asyncio.run(run_load(target, load, bar))
    except aiohttp.ClientError as error:
        print(f"{options.base_url}: {error}", file=sys.stderr)
        return 2
    print(table(summary))
    if options.json == "-":
        print(json.dumps(summary))
    elif options.json:
        Path(options.json).write_text(json.dumps(summary) + "\n", encoding="utf-8")
    return 1 if summary["errors"] else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
