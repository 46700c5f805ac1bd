"""What passes and evictions cost, in lines of the scheduler that they execute: the same count on
every machine, whatever else it does. Bounds are about twice what was counted."""

from __future__ import annotations

import sys
import tracemalloc
from array import array
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from runtime.runner import StepOutput
from runtime.scheduling.page_allocator import PageAllocator
from runtime.scheduling.plan import Plan
from runtime.scheduling.policies import POLICIES
from runtime.scheduling.radix_cache import RadixCache
from runtime.scheduling.scheduler import Scheduler
from tests.runtime.scheduling.scheduler_harness import config, request


def lines_of(call: Callable[[], Any]) -> int:
    """Lines executed below runtime/scheduling."""
    count = 0

    def inside(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return inside

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        return inside if "runtime/scheduling" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def loaded(policy: str, **options: Any) -> Scheduler:
    values = {
        "page_size": 16,
        "capacity_tokens": 1_000_000,
        "context_length": 200_000,
        "max_running_requests": 2,
        "chunked_prefill_size": 512,
        "schedule_policy": policy,
    }
    return Scheduler(config(**{**values, **options}))


def add(scheduler: Scheduler, name: str, tokens: int | list[int], max_new: int) -> None:
    scheduler.add(request(name, tokens, max_new), 0.0)


def turn(scheduler: Scheduler, *, only: str = "") -> int:
    """Lines of one pass, whose step is then committed.

    Args:
        only: every other request of the step is aborted afterwards, so that a row gets free.
    """
    plans: list[Plan] = []
    lines = lines_of(lambda: plans.append(scheduler.plan(0.0)))
    batch = plans[0].batch
    if batch is not None:
        scheduler.commit(batch, StepOutput([7] * len(batch.sampled)), 0.0)
        for admitted in batch.requests if only else ():
            if admitted.request_id != only:
                scheduler.abort(admitted.request_id)
    return lines


def serve(scheduler: Scheduler) -> None:
    while scheduler.has_unfinished:
        batch = scheduler.plan(0.0).batch
        if batch is not None:
            scheduler.commit(batch, StepOutput([7] * len(batch.sampled)), 0.0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.sampled(2)
def test_a_pass_over_a_cached_document_looks_at_little_of_it(policy: str) -> None:
    """128 prompts wait whose first 20,000 to 31,000 tokens are cached, of a document that was
    computed in small chunks. Every one of them was walked through it again in every pass."""
    scheduler = loaded(policy, chunked_prefill_size=128)
    document = list(range(32_000))
    add(scheduler, "document", document, 1)
    serve(scheduler)
    add(scheduler, "running", 5, 5000)
    turn(scheduler)
    for i in range(128):
        add(scheduler, f"w{i}", [*document[: 20_000 + i * 90], *[50_000 + i] * 50], 300)
    assert max(turn(scheduler, only="running") for _ in range(12)) < 20_000


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.sampled(2)
def test_a_pass_over_a_long_queue_looks_at_little_of_it(policy: str) -> None:
    scheduler = loaded(policy)
    for family in range(8):
        add(scheduler, f"f{family}", [family] * 600, 1)
    serve(scheduler)
    add(scheduler, "running", 5, 5000)
    turn(scheduler)
    for i in range(10_000):
        add(scheduler, f"w{i}", [*[i % 8] * (40 + i % 500), i], 1 + i % 7)
    assert max(turn(scheduler, only="running") for _ in range(12)) < 20_000


@pytest.mark.parametrize("tokens", [30, 600])
@pytest.mark.sampled(1)
def test_a_pass_that_looks_for_short_prompts_looks_at_few_of_them(tokens: int) -> None:
    """Beside a prompt that is being cut, 10,000 wait that are short enough to go ahead, or none."""
    scheduler = loaded("fcfs", max_running_requests=300)
    add(scheduler, "long", 30_000, 1)
    turn(scheduler)
    for i in range(10_000):
        add(scheduler, f"w{i}", [7 * i + j for j in range(tokens)], 1)
    assert max(turn(scheduler) for _ in range(12)) < 17_000


def test_a_long_prompt_in_small_chunks_costs_as_much_at_its_end_as_at_its_start() -> None:
    scheduler = loaded("fcfs", chunked_prefill_size=32)
    add(scheduler, "long", 20_000, 1)
    passes = []
    while scheduler.has_unfinished:
        passes.append(turn(scheduler))
    assert len(passes) >= 625
    assert max(passes[-300:]) < 1.2 * max(passes[10:300])


def test_a_pass_that_admits_many_costs_as_much_for_each_as_one_that_admits_few() -> None:
    """Each was compared with every other that it might have to wait for."""

    def lines_per_request(count: int) -> float:
        scheduler = loaded(
            "fcfs", max_running_requests=500, chunked_prefill_size=20_000, max_prefill_tokens=20_000
        )
        for i in range(count):
            add(scheduler, f"r{i}", [1, 2, 3, 4, i, *range(28)], 4)
        lines = turn(scheduler)
        assert scheduler.counters.admitted == count
        return lines / count

    assert lines_per_request(400) < 1.2 * lines_per_request(40)


def filled(leaves: int, policy: str) -> RadixCache:
    """Prompts of a page each, all of which have been used since they came in."""
    allocator = PageAllocator((leaves + 1) * 16, 16)
    cache = RadixCache(allocator, policy)
    keys = [array("i", [i] * 16).tobytes() for i in range(leaves)]
    for key in keys:
        cache.insert("", key, allocator.allocate_pages(1))
    for key in reversed(keys):
        node = cache.match("", key, 16).node
        cache.lock(node)
        cache.count_use(node)
        cache.unlock(node)
    return cache


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
def test_an_eviction_does_not_pay_for_the_uses_before_it(policy: str) -> None:
    cache = filled(5000, policy)
    assert lines_of(lambda: cache.evict(1)) < 100
    # So many pages, so many lines.
    assert lines_of(lambda: cache.evict(1000)) < 100_000


def test_freeing_a_page_of_a_long_prompt_copies_little() -> None:
    """The key of a million tokens takes 4 MB."""
    allocator = PageAllocator(1_000_016, 16)
    cache = RadixCache(allocator)
    pages = allocator.allocate_pages(62_500)
    cache.insert("", array("i", range(1_000_000)).tobytes(), pages)
    tracemalloc.start()
    try:
        assert cache.evict(1) == 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32_768
