"""What a watcher sees of the scheduler: bounded, in order, and true."""

from __future__ import annotations

from runtime.scheduling.glance import LOOKS_PER_RUN
from tests.runtime.scheduling.scheduler_harness import Driver, config, request


def test_requests_are_in_the_order_of_the_queue_and_cut_at_a_number() -> None:
    driver = Driver(config(max_running_requests=2))
    driver.add(*(request(f"r{number}", 5, 10) for number in range(20)))
    driver.step()
    driver.add(request("urgent", 5, 10, priority=1))
    glance = driver.scheduler.glance(4, 1)
    assert [one.request_id for one in glance.admitted] == ["r0", "r1"]
    assert [one.request_id for one in glance.waiting] == ["urgent", "r2", "r3", "r4"]
    assert all(one.blocked_by for one in glance.waiting)
    assert len(driver.scheduler.glance(2, 1).waiting) == 2
    assert len(driver.scheduler.glance(1, 1).holders) == 2, (
        "of those that hold KV nobody is left out"
    )


def test_holders_say_what_is_left_of_a_prompt_that_is_being_cut() -> None:
    driver = Driver(config(chunked_prefill_size=16))
    driver.add(request("long", 50, 8))
    driver.step()
    (holder,) = driver.scheduler.glance(1, 1).holders
    assert holder.kv_tokens + holder.prefill_left == 50
    assert holder.kv_tokens % 16 == 0
    assert (holder.output_tokens, holder.max_new_tokens) == (0, 8)


def test_the_largest_runs_are_those_of_the_tree() -> None:
    driver = Driver(config())
    driver.add(*(request(f"r{size}", size, 2) for size in (8, 40, 24)))
    driver.run()
    nodes = list(driver.scheduler._memory.cache.tree.nodes())
    sizes = sorted((node.end - node.start for node in nodes), reverse=True)
    glance = driver.scheduler.glance(1, 2)
    assert glance.whole_tree
    assert [run.end - run.start for run in glance.runs] == sizes[:2]
    cached = sum(run.end - run.start for run in driver.scheduler.glance(1, len(nodes)).runs)
    assert cached == driver.scheduler.statistics().cached_tokens


def test_a_large_tree_is_not_looked_through() -> None:
    driver = Driver(config(capacity_tokens=2001), checked=False)
    count = LOOKS_PER_RUN + 8
    for number in range(count):
        driver.add(request(f"r{number}", [*range(number, number + 9)], 1))
        driver.run()
    assert len(list(driver.scheduler._memory.cache.tree.nodes())) >= count
    glance = driver.scheduler.glance(1, 1)
    assert not glance.whole_tree
    assert len(glance.runs) == 1
    assert driver.scheduler.glance(1, 2).whole_tree
