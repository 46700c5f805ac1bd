"""The contents of the prefix cache, rebuilt from its events alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test

from runtime.scheduling.cache_events import AllBlocksCleared, BlockRemoved, BlockStored
from tests.effort import tries
from tests.runtime.scheduling.random_lives import configs, lives
from tests.runtime.scheduling.scheduler_harness import Driver, config, request
from tests.runtime.scheduling.scheduler_machine import SchedulerMachine


class Mirror:
    """What a router knows: the cached prefixes by the hash of their last block."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.events = scheduler.watch_cache()
        self.prefixes = {}
        self.seen = []  # every event so far

    def update(self):
        for event in self.events.take():
            self.seen.append(event)
            if isinstance(event, BlockStored):
                self.store(event)
            elif isinstance(event, BlockRemoved):
                for block in event.hashes:
                    del self.prefixes[block]
            else:
                assert event == AllBlocksCleared()
                self.prefixes.clear()

    def store(self, event):
        size = event.block_size
        assert len(event.token_ids) == size * len(event.hashes)
        prefix = (event.namespace,)
        if event.parent_hash is not None:
            prefix = self.prefixes[event.parent_hash]
            assert prefix[0] == event.namespace
        for at, block in enumerate(event.hashes):
            assert block not in self.prefixes, "stored twice"
            prefix = (*prefix, *event.token_ids[at * size : (at + 1) * size])
            self.prefixes[block] = prefix

    def check(self, idle):
        """Args: idle: no step is in flight, so that everything cached is written."""
        self.update()
        told, cached = set(self.prefixes.values()), set(cached_prefixes(self.scheduler))
        assert len(told) == len(self.prefixes), "two hashes for one prefix"
        assert told <= cached
        assert not idle or told == cached
        assert not told & set(unwritten_prefixes(self.scheduler)), "told before it was committed"


def cached_prefixes(scheduler):
    """(namespace, token, ...) of every cached prefix in whole pages."""
    memory = scheduler._memory
    for namespace, root in memory.cache.tree.roots.items():
        stack = [(root, (namespace,))]
        while stack:
            node, prefix = stack.pop()
            tokens = memoryview(bytes(node.key)).cast("i")
            for end in range(memory.page_size, len(tokens) + 1, memory.page_size):
                yield (*prefix, *tokens[:end])
            stack += [(child, (*prefix, *tokens)) for child in node.children.values()]


def unwritten_prefixes(scheduler):
    """Those whose last page a step in flight is to write: of each insertion what it added, from
    what was cached already up to where the request's next insertion begins."""
    memory = scheduler._memory
    ends: dict[str, int] = {}
    for insertion in reversed(memory.insertions):
        made = insertion.request
        end = ends.get(made.request_id, made.scheduling.tree_tokens)
        ends[made.request_id] = insertion.tree_tokens
        if memory.is_lost(made) or made.row < 0:
            continue
        known = insertion.tree_tokens + len(insertion.own) * memory.page_size
        tokens = made.tokens_between(0, end)
        for cut in range(known + memory.page_size, end + 1, memory.page_size):
            yield (made.namespace, *tokens[:cut])


class TellingMachine(SchedulerMachine):
    """The random lives, with somebody who listens."""

    stored = removed = 0

    @initialize(made=configs(), overlap=st.booleans(), guilty=st.sampled_from([0, 7]))
    def start(self, made, overlap, guilty):
        # Without a cache there is nothing to tell.
        super().start(replace(made, disable_radix_cache=False), overlap, guilty)
        self.mirror = Mirror(self.scheduler)

    def check(self):
        self.mirror.check(idle=not self.driver.in_flight)

    def teardown(self):
        super().teardown()
        for event in self.mirror.seen:
            TellingMachine.stored += isinstance(event, BlockStored)
            TellingMachine.removed += isinstance(event, BlockRemoved)


@pytest.mark.slow
def test_random_lives_are_told_as_they_are():
    run_state_machine_as_test(TellingMachine, settings=lives(80))
    assert TellingMachine.stored > 200
    assert TellingMachine.removed > 50


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_random_traffic_is_told_as_it_is(policy):
    rng = random.Random(3)
    made = config(page_size=4, capacity_tokens=404, chunked_prefill_size=24, eviction_policy=policy)
    driver = Driver(made, checked=False)
    mirror = Mirror(driver.scheduler)
    for number in range(tries(500)):
        prefix = [rng.randrange(6)] * rng.randrange(1, 60)
        driver.add(request(f"r{number}", [*prefix, number], rng.randrange(1, 9)))
        for _ in range(rng.randrange(1, 5)):
            if driver.in_flight and rng.random() < 0.05:
                driver.fail()
            elif rng.random() < 0.02:
                driver.scheduler.flush()
            else:
                driver.step()
            mirror.check(idle=not driver.in_flight)
    driver.run()
    mirror.check(idle=True)
    kinds = [type(event) for event in mirror.seen]
    assert kinds.count(BlockStored) > tries(300)
    assert kinds.count(BlockRemoved) > tries(300)


def test_events_hold_what_was_written_in_order_and_hashes_chain():
    driver = Driver(config(page_size=4, capacity_tokens=400))
    mirror = Mirror(driver.scheduler)
    driver.add(request("a", range(100, 110), 1))
    driver.plan()
    assert driver.in_flight
    assert mirror.events.take() == [], "the step that writes it is not committed"
    driver.commit()
    mirror.check(idle=True)
    (first,) = mirror.seen
    assert list(first.token_ids) == list(range(100, 108))
    assert (first.parent_hash, len(first.hashes)) == (None, 2)
    driver.add(request("b", [*range(100, 108), 7, 7, 7, 7, 7], 1))
    driver.run()
    mirror.check(idle=True)
    assert mirror.seen[-1].parent_hash == first.hashes[-1]
    driver.add(request("c", range(100, 108), 1, namespace="other"))
    driver.run()
    mirror.check(idle=True)
    assert mirror.seen[-1].parent_hash is None
    assert not set(mirror.seen[-1].hashes) & set(first.hashes), "namespaces share nothing"
    assert driver.scheduler.flush()
    mirror.check(idle=True)
    assert mirror.seen[-1] == AllBlocksCleared()


def test_two_engines_give_one_prefix_one_hash():
    hashes = []
    for name in ("a", "b"):
        driver = Driver(config(page_size=4))
        mirror = Mirror(driver.scheduler)
        driver.add(request(name, range(8), 1))
        driver.run()
        mirror.update()
        hashes.append(mirror.seen[0].hashes)
    assert hashes[0] == hashes[1]


def test_what_a_failed_step_was_to_write_is_never_told():
    driver = Driver(config(page_size=4))
    mirror = Mirror(driver.scheduler)
    driver.add(request("a", range(8), 1))
    driver.plan()
    driver.fail()
    mirror.check(idle=True)
    assert mirror.seen == []


def test_pages_that_are_taken_again_after_a_flush_are_told_by_what_they_hold_now():
    driver = Driver(config(page_size=4))
    mirror = Mirror(driver.scheduler)
    driver.add(request("before", range(8), 1))
    driver.run()
    assert driver.scheduler.flush()
    mirror.check(idle=True)
    driver.add(request("after", range(100, 108), 1))
    driver.plan()
    driver.fail()
    mirror.check(idle=True)
    assert mirror.seen[-1] == AllBlocksCleared(), "nothing was written since"
