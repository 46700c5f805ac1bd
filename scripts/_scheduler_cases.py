"""The hard cases of scheduling, each with the bound it must keep: see bench_scheduler.py.

A case returns what its worst pass (or its worst slice, or one eviction) takes, in microseconds. The
bound is for one core of a server of today; it leaves out what grows with what a pass really does,
the requests that it admits and the pages that it frees.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from runtime.config import SchedulerConfig
from runtime.request import Request, SamplingParams
from runtime.runner import StepOutput
from runtime.scheduling.page_allocator import PageAllocator
from runtime.scheduling.policies import POLICIES
from runtime.scheduling.radix_cache import RadixCache
from runtime.scheduling.scheduler import Scheduler

PASS_US = 2000.0
SLICE_US = 1000.0


@dataclass(frozen=True)
class Case:
    """One figure.

    Args:
        name: what is measured.
        run: (scale) to microseconds; at scale 1 the sizes are those of the name.
    """

    name: str
    run: Callable[[float], float]
    bound_us: float = PASS_US


def make_scheduler(capacity_tokens: int, **options: Any) -> Scheduler:
    values = {"context_length": 1 << 22, "max_running_requests": 4, **options}
    return Scheduler(SchedulerConfig(capacity_tokens=capacity_tokens, **values))


def make_request(name: str, tokens: list[int], max_new: int) -> Request:
    sampling = SamplingParams(max_new_tokens=max_new, ignore_eos=True)
    return Request(name, array("i", tokens), sampling, 0.0)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.thread_time()
    result = call()
    return (time.thread_time() - started) * 1e6, result


def one_pass(scheduler: Scheduler, enough: int = 0) -> float:
    """Microseconds of a plan and its commit.

    Args:
        enough: all but so many of the step's requests, the first, are aborted afterwards.
    """
    planned, plan = timed(lambda: scheduler.plan(0.0))
    batch = plan.batch
    if batch is None:
        return planned
    output = StepOutput([7] * len(batch.sampled), device_s=0.01)
    committed, _ = timed(lambda: scheduler.commit(batch, output, 0.0))
    if enough:
        oldest = sorted(batch.requests, key=lambda request: request.scheduling.seq)
        for request in oldest[enough:]:
            scheduler.abort(request.request_id)
    return planned + committed


def serve(scheduler: Scheduler) -> float:
    """Serves until nothing is left; the worst pass."""
    worst = 0.0
    while scheduler.has_unfinished:
        worst = max(worst, one_pass(scheduler))
    return worst


def running(scheduler: Scheduler, count: int) -> None:
    """Requests that go on and on."""
    for i in range(count):
        scheduler.add(make_request(f"running{i}", [1 + i] * 5, 100_000), 0.0)
    while scheduler.statistics().running < count:
        one_pass(scheduler)


def small_chunks(scale: float) -> float:
    scheduler = make_scheduler(200_000, chunked_prefill_size=32)
    tokens = int(32_000 * scale)
    scheduler.add(make_request("long", list(range(tokens)), 2), 0.0)
    return serve(scheduler)


def over_a_document(policy: str) -> Callable[[float], float]:
    """Every pass admits one of the prompts, whose first 20,000 to 31,000 tokens are cached."""

    def run(scale: float) -> float:
        scheduler = make_scheduler(
            2_000_000, schedule_policy=policy, max_running_requests=2, chunked_prefill_size=128
        )
        document = list(range(int(32_000 * scale)))
        scheduler.add(make_request("document", document, 1), 0.0)
        serve(scheduler)
        running(scheduler, 2)
        for i in range(128):
            head = document[: int((20_000 + i * 90) * scale)]
            scheduler.add(make_request(f"waiting{i}", [*head, *[50_000 + i] * 50], 300), 0.0)
        scheduler.abort("running1")
        return max(admitting_passes(scheduler, 40))

    return run


def admitting_passes(scheduler: Scheduler, count: int) -> Iterator[float]:
    """Passes each of which finds a row free."""
    for _ in range(count):
        yield one_pass(scheduler, enough=1)


def long_queue(policy: str) -> Callable[[float], float]:
    def run(scale: float) -> float:
        scheduler = make_scheduler(
            2_000_000, schedule_policy=policy, max_running_requests=2, chunked_prefill_size=512
        )
        rng = random.Random(1)
        heads = [[family + 1] * 2000 for family in range(8)]
        for family, head in enumerate(heads):
            scheduler.add(make_request(f"head{family}", head, 1), 0.0)
        serve(scheduler)
        running(scheduler, 2)
        for i in range(int(10_000 * scale)):
            head = rng.choice(heads)[: rng.randrange(16, 2000)]
            scheduler.add(make_request(f"waiting{i}", [*head, *[i] * 40], rng.randint(2, 8)), 0.0)
        scheduler.abort("running1")
        return max(admitting_passes(scheduler, 40))

    return run


def long_prefix(scale: float) -> float:
    """A request with a million cached tokens: arrives, is blocked, admitted, ends."""
    tokens = int(1_000_000 * scale) // 16 * 16
    scheduler = make_scheduler(
        2 * tokens + 100_000,
        max_running_requests=2,
        chunked_prefill_size=8192,
        schedule_policy="lpm",
    )
    prompt = list(range(tokens))
    scheduler.add(make_request("first", prompt, 1), 0.0)
    worst = serve(scheduler)
    running(scheduler, 2)
    second = make_request("second", [*prompt, *range(100)], 3)
    arrival, _ = timed(lambda: scheduler.add(second, 0.0))
    worst = max(worst, arrival, *(one_pass(scheduler) for _ in range(5)))
    scheduler.abort("running0")
    scheduler.abort("running1")
    return max(worst, serve(scheduler))


def filled_cache(leaves: int, tokens: int, policy: str) -> tuple[PageAllocator, RadixCache]:
    """A cache that holds nothing but prompts of this many tokens, unlike one another."""
    size = 16
    allocator = PageAllocator((leaves * (tokens // size) + 1) * size, size)
    cache = RadixCache(allocator, policy)
    for i in range(leaves):
        key = array("i", [i] * tokens).tobytes()
        cache.insert("", key, allocator.allocate_pages(tokens // size))
    return allocator, cache


def first_eviction(policy: str) -> Callable[[float], float]:
    def run(scale: float) -> float:
        leaves = int(50_000 * scale)
        _, cache = filled_cache(leaves, 16, policy)
        for i in range(leaves):
            match = cache.match("", array("i", [i] * 16).tobytes(), 16)
            cache.lock(match.node)
            cache.count_use(match.node)
            cache.unlock(match.node)
        return timed(lambda: cache.evict(1))[0]

    return run


def one_page_of_a_long_leaf(scale: float) -> float:
    _, cache = filled_cache(1, int(1_000_000 * scale) // 16 * 16, "lru")
    return max(timed(lambda: cache.evict(1))[0] for _ in range(100))


def thousand_pages(scale: float) -> float:
    """Of leaves of one page each, the dearest to free."""
    _, cache = filled_cache(int(20_000 * scale), 16, "lru")
    pages = int(1000 * scale)
    return timed(lambda: cache.evict(pages))[0] / pages


def many_twins(scale: float) -> float:
    """Per request of a pass that admits hundreds of short prompts, all over one long prefix."""
    count = int(482 * scale)
    scheduler = make_scheduler(
        4_000_000, max_running_requests=1024, chunked_prefill_size=16_384, max_prefill_tokens=16_384
    )
    prefix = list(range(2000))
    scheduler.add(make_request("prefix", prefix, 1), 0.0)
    serve(scheduler)
    for i in range(count):
        scheduler.add(make_request(f"r{i}", [*prefix, *[50_000 + i] * 33], 2), 0.0)
    before = scheduler.counters.admitted
    spent = one_pass(scheduler)
    return spent / (scheduler.counters.admitted - before)


def idle_recount(scale: float) -> float:
    scheduler = make_scheduler(
        int(326_000 * 16 * scale), chunked_prefill_size=8192, max_prefill_tokens=8192
    )
    for i in range(int(300 * scale)):
        scheduler.add(make_request(f"r{i}", [i * 9000 + k for k in range(8000)], 2), 0.0)
        serve(scheduler)
    worst, more = 0.0, True
    while more:
        spent, more = timed(scheduler.check_some)
        worst = max(worst, spent)
    error = scheduler.statistics().invariant_error
    assert error is None, error
    return worst


CASES = [
    Case("32,000 tokens in chunks of 32, worst pass", small_chunks),
    *(
        Case(f"{policy}: 128 waiting over a cached document, worst pass", over_a_document(policy))
        for policy in POLICIES
    ),
    *(Case(f"{policy}: 10,000 waiting, worst pass", long_queue(policy)) for policy in POLICIES),
    Case("1,000,000 cached tokens of one prompt, worst pass", long_prefix),
    *(
        Case(f"{policy}: first page freed after 50,000 uses", first_eviction(policy), 100.0)
        for policy in ("lru", "lfu", "fifo")
    ),
    Case("one page of 1,000,000 tokens freed, worst of 100", one_page_of_a_long_leaf, 100.0),
    Case("1,000 prompts of one page freed, per page", thousand_pages, 20.0),
    Case("482 admitted over one prefix, per request", many_twins, 60.0),
    Case("recount of 326,000 pages when idle, worst slice", idle_recount, SLICE_US),
]
