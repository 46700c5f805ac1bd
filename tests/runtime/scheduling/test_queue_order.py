"""Policies: in which order the queue is looked at."""

from __future__ import annotations

from collections import Counter

import pytest

from runtime.request import Request
from runtime.runner import StepOutput
from runtime.scheduling.policies import POLICIES
from runtime.scheduling.scheduler import Scheduler
from tests.runtime.scheduling.scheduler_harness import Driver, config, request
from tests.values import present

WARM = list(range(5000, 5100))


def driver_of(policy: str, **options: object) -> Driver:
    """A scheduler that has WARM in its cache and one slot."""
    values = {"capacity_tokens": 2001, "max_running_requests": 1, **options}
    driver = Driver(config(schedule_policy=policy, **values))
    driver.add(request("warm", WARM, 1))
    return driver.run()


def order_of(driver: Driver, *requests: Request) -> list[str]:
    """Names in the order in which they are admitted, one at a time."""
    driver.add(*requests)
    driver.run()
    started = sorted(requests, key=lambda made: made.scheduling.started_s or 0.0)
    return [made.request_id for made in started]


def test_fcfs_is_arrival() -> None:
    made = [request(name, 5, 2) for name in "bca"]
    assert order_of(driver_of("fcfs"), *made) == ["b", "c", "a"]


def test_lpm_is_the_longest_cached_prefix_first_ties_by_arrival() -> None:
    made = [
        request("cold", 10, 2),
        request("half", [*WARM[:50], 1], 2),
        request("cold2", 10, 2),
        request("full", [*WARM, 1], 2),
        request("full2", [*WARM, 2], 2),
    ]
    driver = driver_of("lpm")
    assert order_of(driver, *made) == ["full", "full2", "half", "cold", "cold2"]


def test_a_burst_over_a_long_document_is_ordered_at_once() -> None:
    """It takes more to find out what is cached of them all than a pass may spend on that."""
    document = list(range(30_000))
    options = {"capacity_tokens": 60_001, "context_length": 40_000, "chunked_prefill_size": 8192}
    scheduler = Scheduler(config(schedule_policy="lpm", max_running_requests=1, **options))
    scheduler.add(request("document", document, 1), 0.0)
    for _ in range(4):
        batch = present(scheduler.plan(0.0).batch)
        scheduler.commit(batch, StepOutput([7] * len(batch.sampled)), 0.0)
    for i in range(60):
        scheduler.add(request(f"r{i}", [*document[: 20_000 + 100 * i], 50_000 + i], 1), 0.0)
    assert [made.request_id for made in present(scheduler.plan(0.0).batch).requests] == ["r59"]


def test_lpm_with_a_long_queue_is_fcfs() -> None:
    made = [request(f"cold{i}", 3, 1) for i in range(129)]
    hot = request("hot", [*WARM, 1], 1)
    order = order_of(driver_of("lpm"), *made, hot)
    # The first two passes see more than 128.
    assert order[:2] == ["cold0", "cold1"]
    assert order[2] == "hot"


def test_dfs_weight_counts_requests_and_not_branches() -> None:
    """Three requests below one branch of the first subtree weigh more than two of the second."""
    driver = driver_of("dfs-weight", max_running_requests=8)
    ends = {name: [*WARM, *range(first, first + 20)] for name, first in (("a", 7000), ("b", 8000))}
    for name, end in ends.items():
        driver.add(*(request(f"{name}{leaf}", [*end, 9000 + leaf], 1) for leaf in range(2)))
        driver.run()
    driver.add(*(request(f"light{leaf}", [*ends["b"], 9000 + leaf, 1], 1) for leaf in range(2)))
    driver.add(*(request(f"heavy{i}", [*ends["a"], 9000, i], 1) for i in range(3)))
    driver.run()
    admitted = [made.request_id for made in driver.batches[-1].requests]
    assert admitted == ["heavy0", "heavy1", "heavy2", "light0", "light1"]


def test_dfs_weight_goes_down_the_heaviest_subtree_first() -> None:
    driver = driver_of("dfs-weight", max_running_requests=8)
    left, right = [*WARM], [*WARM[:50], *range(7000, 7050)]
    driver.add(request("fork", right, 1))
    driver.run()
    driver.add(
        request("none", 10, 1),
        request("left", [*left, 1], 1),
        request("root", [*WARM[:50], 2], 1),
        request("right1", [*right, 3], 1),
        request("right2", [*right, 4], 1),
    )
    driver.run()
    admitted = [made.request_id for made in driver.batches[-1].requests]
    assert admitted == ["right1", "right2", "left", "root", "none"]


def test_lof_is_the_longest_output_first() -> None:
    made = [request("s", 5, 2), request("l", 5, 9), request("m", 5, 4)]
    assert order_of(driver_of("lof"), *made) == ["l", "m", "s"]


def test_hrrn_weighs_waiting_against_work() -> None:
    driver = driver_of("hrrn")
    driver.add(request("running", 5, 60))
    driver.step()
    long, short = request("long", 150, 20), request("short", 5, 2)
    driver.add(long)
    for _ in range(20):
        driver.step()
    driver.add(short)
    driver.run()
    # About 60 tokens were computed after long came, 40 after short: 1 + 60/170 against 1 + 40/7.
    assert present(short.scheduling.started_s) < present(long.scheduling.started_s)


def test_random_is_a_seeded_shuffle() -> None:
    def order(seed: int) -> list[str]:
        made = [request(f"r{i}", 3, 1) for i in range(20)]
        return order_of(driver_of("random", policy_seed=seed), *made)

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1) != sorted(order(1))
    assert len(set(order(1))) == 20


def test_random_has_every_request_first_equally_often() -> None:
    scheduler = Scheduler(config(schedule_policy="random", max_running_requests=1))
    for i in range(5):
        scheduler.add(request(f"r{i}", 3, 1), 0.0)
    first = Counter(
        next(iter(scheduler._admission._candidates(0.0))).request_id for _ in range(5000)
    )
    # Binomial(5000, 1/5): four standard deviations are 113.
    assert all(abs(count - 1000) < 113 for count in first.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_priority_stands_above_every_policy(policy: str) -> None:
    made = [
        request("low-hot", [*WARM, 1], 9, priority=1),
        request("high", 10, 1, priority=2),
        request("low", 10, 5, priority=1),
    ]
    assert order_of(driver_of(policy), *made)[0] == "high"


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_a_cache_aware_policy_without_a_cache_is_fcfs(policy: str) -> None:
    made = [request("cold", 5, 2), request("hot", [*WARM, 1], 2)]
    driver = driver_of(policy, disable_radix_cache=True)
    assert order_of(driver, *made) == ["cold", "hot"]


def test_the_age_bound_counts_from_being_passed_over() -> None:
    driver = driver_of("lof", max_queue_skip_ms=100.0)
    cold = request("cold", 5, 1)
    driver.add(request("running", 5, 30), cold)
    for _ in range(20):
        driver.step()
    assert cold.scheduling.passed_over_s is None, "nobody who came later was admitted"
    driver.add(request("later", 5, 30))
    driver.run()
    assert list(driver.ended)[-1] == "cold", "0.3 s of waiting alone give no right of way"


def test_a_passed_over_request_goes_first_after_the_bound() -> None:
    driver = driver_of("lof", max_queue_skip_ms=100.0)
    cold = request("cold", 5, 1)
    driver.add(cold, *[request(f"big{i}", 5, 8) for i in range(10)])
    driver.run()
    ended = list(driver.ended)
    # Each of the others takes 9 turns of 10 ms: one is ahead, and the one running when time is up.
    assert ended.index("cold") - ended.index("big0") <= 2


def test_a_retracted_request_comes_back_before_later_arrivals() -> None:
    driver = Driver(config(capacity_tokens=101, schedule_conservativeness=0.0))
    driver.add(*[request(f"r{i}", 15, 40) for i in range(5)])
    while not driver.scheduler.counters.retractions:
        driver.step()
    waiting = [item.request_id for item in driver.scheduler._life.queue]
    assert waiting == sorted(waiting)
    driver.run()


def test_no_policy_both_sorts_and_shuffles() -> None:
    for policy in POLICIES.values():
        assert not (policy.shuffled and policy.keys)
