"""The recount: what it finds, and that it never keeps anybody waiting."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from runtime.errors import InvariantError
from runtime.scheduling.invariants import SLICE
from runtime.scheduling.kv_memory import Insertion
from runtime.scheduling.pins import NO_KEY
from runtime.scheduling.radix_tree import Node
from runtime.scheduling.scheduler import Scheduler
from tests.runtime.scheduling.scheduler_harness import Driver, config, request
from tests.values import present


def served(**options: object) -> Driver:
    """An idle scheduler with two prompts in its cache that share a beginning."""
    driver = Driver(config(pin_share=1.0, **options), checked=False)
    shared = list(range(5000, 5040))
    driver.add(request("a", [*shared, 1, 2, 3], 2), request("b", [*shared, 4, 5, 6], 2))
    return driver.run()


def slices(scheduler: Scheduler) -> int:
    """Calls until the recount is over."""
    count = 1
    while scheduler.check_some():
        count += 1
    return count


def _leaf(scheduler: Scheduler) -> Node:
    return present(scheduler._memory.cache.order.first())


def _take_a_page(scheduler: Scheduler) -> None:
    scheduler._memory.allocator.allocate_pages(1)


def _free_twice(scheduler: Scheduler) -> None:
    scheduler._memory.allocator.free([_leaf(scheduler).pages[0]])


def _lock(scheduler: Scheduler) -> None:
    _leaf(scheduler).locks += 1


def _rank(scheduler: Scheduler) -> None:
    _leaf(scheduler).last_used += 1


def _leave_order(scheduler: Scheduler) -> None:
    scheduler._memory.cache.order.remove(_leaf(scheduler).rank)


def _move(scheduler: Scheduler) -> None:
    _leaf(scheduler).start += 1


def _piece(scheduler: Scheduler) -> None:
    leaf = _leaf(scheduler)
    leaf.pieces = (*leaf.pieces, (leaf.end, 1))


def _stamp(scheduler: Scheduler) -> None:
    scheduler._memory.insertions.append(Insertion(request("c", 9), 7, 0, array("i")))


def _pin(scheduler: Scheduler) -> None:
    _leaf(scheduler).pins += 1


def _pinned_tokens(scheduler: Scheduler) -> None:
    scheduler._memory.cache.pins.tokens += 1


def _lost_pin(scheduler: Scheduler) -> None:
    leaf = _leaf(scheduler)
    scheduler._memory.cache.pins.keep(leaf, NO_KEY, 1e9)
    next(iter(scheduler._memory.cache.pins)).node = present(leaf.parent)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_take_a_page, "1 of 201 pages have no owner"),
        (_free_twice, "more than one owner"),
        (_lock, "1 locks and 0 owners"),
        (_rank, "is ranked"),
        (_leave_order, "order of eviction"),
        (_move, "not where it should be"),
        (_piece, "pieces"),
        (_stamp, "not in flight"),
        (_pin, "is ranked"),
        (_pinned_tokens, "tokens are pinned, recounted 0"),
        (_lost_pin, "a node has 1 pins and"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_book_is_found(spoil: Callable[[Scheduler], None], message: str) -> None:
    scheduler = served().scheduler
    scheduler.check()
    spoil(scheduler)
    with pytest.raises(InvariantError, match=message):
        scheduler.check()
    slices(scheduler)
    found = scheduler.statistics().invariant_error
    assert found is not None
    assert message in found


def test_what_is_misremembered_of_a_waiting_prompt_is_found() -> None:
    driver = Driver(config(max_running_requests=1), checked=False)
    driver.add(request("first", 30, 9), request("waiting", 20, 2))
    driver.step()
    driver.scheduler.check()
    waiting = driver.scheduler._life.live["waiting"].scheduling.place
    running = driver.scheduler._life.live["first"].scheduling
    waiting.node, waiting.tokens = running.node, 10
    with pytest.raises(InvariantError, match="misremembers"):
        driver.scheduler.check()


def test_a_recount_when_idle_is_cut_in_slices() -> None:
    scheduler = served(capacity_tokens=50 * SLICE).scheduler
    assert slices(scheduler) > 50, "no call looks at more than a few thousand pages"
    assert slices(scheduler) == 1, "nothing has changed since"
    assert scheduler.statistics().invariant_error is None


def test_a_recount_starts_again_when_something_has_changed_meanwhile() -> None:
    driver = served(capacity_tokens=20 * SLICE)
    scheduler = driver.scheduler
    assert scheduler.check_some()
    driver.add(request("c", 30, 2))
    assert not scheduler.check_some(), "there is work"
    driver.run()
    assert scheduler.check_some()
    scheduler.flush()
    assert slices(scheduler) > 20
    assert scheduler.statistics().invariant_error is None


def test_a_recount_under_way_changes_no_decision() -> None:
    """Two schedulers are told the same; one of them recounts whenever it is idle."""
    drivers = [served(capacity_tokens=5 * SLICE) for _ in range(2)]
    for turn in range(6):
        drivers[0].scheduler.check_some()
        for driver in drivers:
            driver.add(request(f"r{turn}", 20 + turn, 3))
            driver.run()
    decided = [
        [(list(batch.rows), list(batch.table_pages)) for batch in driver.batches]
        for driver in drivers
    ]
    assert decided[0] == decided[1]
