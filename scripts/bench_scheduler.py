#!/usr/bin/env python3
"""What scheduling costs: time of plan + commit per step, and how it grows.

The device waits for this time unless it is hidden, so it is measured by itself: no model, no
server, tokens made up. Times are CPU microseconds of this thread, so other processes do not show
in the worst step; each figure is the median over steps, with the 99th percentile and the worst step
beside it, after a warm-up, with the garbage collector off as in `timeit`.

    running   decode-only steps, 1 to 1,024 rows (prefix caching on, pages of 16, 200-token prompts)
    waiting   256 running rows, no free slot or no KV left, 0 to 10,000 requests waiting, fcfs
    policies  steps that admit from 10,000 waiting requests, half of whose prompts are one of eight
              prefixes, under every policy
    prefix    a prompt whose first 10 to 1,000,000 tokens are cached
    bounds    the hard cases, each beside the time it must keep to; what is over is measured again,
              twice at most, since other processes show in caches and clocks

Usage: python scripts/bench_scheduler.py [PART ...] [--steps N]
Each part ends with one line of JSON. The exit status is 1 where a bound was not kept.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import random
import statistics
import sys
import time
from array import array
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.request import Request
from runtime.runner import StepOutput
from runtime.scheduling.page_allocator import PageAllocator
from runtime.scheduling.policies import POLICIES
from runtime.scheduling.radix_cache import RadixCache
from runtime.scheduling.scheduler import Scheduler
from scripts._scheduler_cases import CASES, make_request, make_scheduler

PAGE = 16
PROMPT = 200
LONG = 1 << 20


def scheduler_of(rows: int, capacity_tokens: int = 64 * LONG, **options: Any) -> Scheduler:
    """A pool that never runs out, unless told otherwise."""
    return make_scheduler(
        capacity_tokens,
        context_length=2 * LONG,
        page_size=PAGE,
        max_running_requests=rows,
        chunked_prefill_size=8192,
        **options,
    )


def random_request(
    name: str,
    rng: random.Random,
    max_new: int = 4000,
    prefix: list[int] | None = None,
    tokens: int = PROMPT,
) -> Request:
    head = prefix or []
    ids = head + [rng.randrange(50_000) for _ in range(tokens - len(head))]
    return make_request(name, ids, max_new)


class Loop:
    """The overlapped loop on a device that takes no time."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.flight: tuple[Any, StepOutput] | None = None

    def turn(self) -> float:
        """Seconds of one plan and one commit; making up tokens is not counted."""
        started = time.thread_time()
        batch = self.scheduler.plan(self.now).batch
        planned = time.thread_time() - started
        output = StepOutput([7] * len(batch.sampled)) if batch is not None else None
        started = time.thread_time()
        if self.flight is not None:
            self.scheduler.commit(*self.flight, self.now)
        committed = time.thread_time() - started
        self.flight = None if batch is None or output is None else (batch, output)
        self.now += 0.01
        return planned + committed

    def turns(self, count: int) -> list[float]:
        return [self.turn() for _ in range(count)]

    def until_running(self, rows: int) -> None:
        while self.scheduler.statistics().running < rows:
            self.turn()


def summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median_us": round(statistics.median(ordered) * 1e6, 2),
        "p99_us": round(ordered[int(0.99 * (len(ordered) - 1))] * 1e6, 2),
        "max_us": round(ordered[-1] * 1e6, 2),
    }


def growth(points: list[tuple[int, float]]) -> float:
    """Exponent of the power law between the two largest sizes: 0 is flat, 1 linear."""
    (size, before), (larger, after) = points[-2], points[-1]
    return round(math.log(after / before) / math.log(larger / size), 2)


def bench_running(steps: int) -> dict[str, Any]:
    print(f"{'rows':>6} {'us/step':>10} {'p99':>10} {'max':>10} {'us/row':>8}")
    found, points = {}, []
    for rows in (1, 4, 16, 64, 256, 1024):
        rng = random.Random(1)
        loop = Loop(scheduler_of(rows))
        for i in range(rows):
            loop.scheduler.add(random_request(f"r{i}", rng), 0.0)
        loop.until_running(rows)
        loop.turns(50)
        times = summary(loop.turns(steps))
        per_row = round(times["median_us"] / rows, 3)
        print(
            f"{rows:>6} {times['median_us']:>10} {times['p99_us']:>10} {times['max_us']:>10}"
            f" {per_row:>8}"
        )
        found[rows] = {**times, "us_per_row": per_row}
        points.append((rows, times["median_us"]))
    return {"rows": found, "growth": growth(points)}


def bench_waiting(steps: int) -> dict[str, Any]:
    print(f"{'waiting':>8} {'for':>8} {'us/step':>10} {'p99':>10} {'max':>10}")
    found: dict[str, Any] = {}
    points: dict[str, list[tuple[int, float]]] = {"rows": [], "kv_total": []}
    for waiting in (0, 10, 100, 1000, 10_000):
        for blocked_by, collected in points.items():
            loop = blocked_loop(waiting, blocked_by)
            loop.turns(50)
            times = summary(loop.turns(steps))
            assert not waiting or loop.scheduler.statistics().reason == blocked_by
            print(
                f"{waiting:>8} {blocked_by:>8} {times['median_us']:>10} {times['p99_us']:>10}"
                f" {times['max_us']:>10}"
            )
            found[f"{waiting}/{blocked_by}"] = times
            collected.append((max(waiting, 1), times["median_us"]))
    return {"waiting": found, "growth": {name: growth(p) for name, p in points.items()}}


def blocked_loop(waiting: int, blocked_by: str) -> Loop:
    """256 running rows, and this many requests that wait for a slot, or behind a prompt too long
    for the KV that is left."""
    rng = random.Random(1)
    rows = 256 if blocked_by == "rows" else 1024
    loop = Loop(scheduler_of(rows, capacity_tokens=1_200_000))
    for i in range(256):
        loop.scheduler.add(random_request(f"r{i}", rng), 0.0)
    loop.until_running(256)
    for i in range(waiting):
        tokens = LONG if blocked_by == "kv_total" and not i else PROMPT
        loop.scheduler.add(random_request(f"w{i}", rng, 1000, tokens=tokens), 0.0)
    return loop


def bench_policies(steps: int) -> dict[str, Any]:
    print(f"{'policy':>12} {'waiting':>8} {'us/step':>10} {'p99':>10} {'max':>10}")
    found: dict[str, Any] = {}
    for policy in POLICIES:
        for waiting in (128, 10_000):
            rng = random.Random(1)
            loop = Loop(scheduler_of(16, schedule_policy=policy))
            prefixes = [[1 + family] * (PROMPT // 2) for family in range(8)]
            for i in range(waiting):
                # Short outputs: nearly every step frees a slot, so that it looks at the queue.
                prefix = rng.choice(prefixes)
                loop.scheduler.add(random_request(f"r{i}", rng, rng.randint(2, 8), prefix), 0.0)
            loop.turns(5)
            times = summary(loop.turns(min(steps, waiting // 4)))
            print(
                f"{policy:>12} {waiting:>8} {times['median_us']:>10} {times['p99_us']:>10}"
                f" {times['max_us']:>10}"
            )
            found[f"{policy}/{waiting}"] = times
    return {"policies": found}


def bench_prefix(steps: int) -> dict[str, Any]:
    """One cached prompt in pieces of at least 128 tokens, as chunked prefill leaves it, beside
    1,000 others of 200 tokens."""
    print(f"{'cached':>8} {'us/match':>10} {'ns/token':>9}")
    found, points = {}, []
    for cached in (10, 100, 1000, 10_000, 100_000, 1_000_000):
        rng = random.Random(1)
        allocator = PageAllocator(2 * cached + (1 << 20), PAGE)
        cache = RadixCache(allocator)
        for _ in range(1000):
            insert(cache, allocator, array("i", [rng.randrange(50_000) for _ in range(PROMPT)]))
        prompt = array("i", [rng.randrange(50_000) for _ in range(cached + PAGE)])
        for end in range(128, cached, max(128, cached // 100)):
            insert(cache, allocator, prompt[:end])
        insert(cache, allocator, prompt[: cached // PAGE * PAGE])
        key = prompt.tobytes()
        times = []
        for _ in range(min(steps, 200)):
            started = time.thread_time()
            match = cache.match("", key, len(prompt) - 1)
            times.append(time.thread_time() - started)
        assert match.tokens == cached // PAGE * PAGE
        median = statistics.median(times)
        print(f"{cached:>8} {median * 1e6:>10.2f} {median * 1e9 / cached:>9.2f}")
        found[cached] = {"us": round(median * 1e6, 2), "ns_per_token": median * 1e9 / cached}
        points.append((cached, median))
    return {"cached_tokens": found, "growth": growth(points)}


def insert(cache: RadixCache, allocator: PageAllocator, tokens: array[int]) -> None:
    whole = len(tokens) // PAGE * PAGE
    if whole:
        pages = allocator.allocate_pages(whole // PAGE)
        known, _ = cache.insert("", tokens[:whole].tobytes(), pages)
        allocator.free(pages[: known // PAGE])


def bench_bounds(steps: int, scale: float = 1.0) -> dict[str, Any]:
    print(f"{'us':>9} {'bound':>6}")
    found: dict[str, Any] = {}
    for case in CASES:
        figure = case.run(scale)
        for _ in range(2):
            if figure <= case.bound_us:
                break
            figure = min(figure, case.run(scale))
        verdict = "ok" if figure <= case.bound_us else "over"
        print(f"{figure:>9.1f} {case.bound_us:>6.0f} {verdict:<5} {case.name}", flush=True)
        found[case.name] = {
            "us": round(figure, 1),
            "bound_us": case.bound_us,
            "ok": verdict == "ok",
        }
        gc.collect()
    return {"bounds": found}


PARTS = {
    "running": bench_running,
    "waiting": bench_waiting,
    "policies": bench_policies,
    "prefix": bench_prefix,
    "bounds": bench_bounds,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; else all")
    parser.add_argument("--steps", type=int, default=300, help="measured steps per figure")
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}: must be of {', '.join(PARTS)}")
    kept = True
    for name in options.parts or PARTS:
        gc.collect()
        gc.disable()
        result = PARTS[name](options.steps)
        gc.enable()
        head = {"part": name, "python": platform.python_version(), "page_size": PAGE}
        print(json.dumps({**head, "prompt_tokens": PROMPT, **result}), flush=True)
        kept &= all(case["ok"] for case in result.get("bounds", {}).values())
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
