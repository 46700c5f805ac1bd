"""The pool, the tier below it and the block table, recounted from scratch by slow, plain code.

It looks at requests, at the launched batches, and at the raw contents of free lists and trees, and
trusts no counter and no pointer that the scheduler keeps for itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from runtime.request import Request
from runtime.scheduling.radix_cache import RadixCache
from runtime.scheduling.radix_tree import Node
from runtime.scheduling.schedule_batch import ScheduleBatch
from runtime.scheduling.scheduler import Scheduler
from tests.runtime.scheduling.fake_device import SPOILT, FakeDevice

Prefix = tuple[str, tuple[int, ...]]  # a cached prefix: namespace, tokens in whole pages


@dataclass
class Launched:
    """A step in flight: the pages it names, those it writes to, and everybody's progress before."""

    batch: ScheduleBatch
    pages: set[int]
    written: set[int]
    before: dict[str, tuple[int, bool, bool]]


@dataclass
class NaiveBooks:
    """Who has what.

    Args:
        scheduler: what is checked.
        device: what it schedules for: where KV is truly written.
        requests: all that have come. launched: steps in flight.
        load_prefixes: by load that is on its way, behind which tokens it goes on.
    """

    scheduler: Scheduler
    device: FakeDevice
    requests: list[Request] = field(default_factory=list)
    launched: list[Launched] = field(default_factory=list)
    load_prefixes: dict[int, Prefix] = field(default_factory=dict)

    @property
    def page_size(self) -> int:
        return self.scheduler.config.page_size

    @property
    def holders(self) -> list[Request]:
        return [request for request in self.requests if request.row >= 0]

    def launch(self, batch: ScheduleBatch, before: dict[str, tuple[int, bool, bool]]) -> None:
        """A step is launched. Args: before: everybody's progress."""
        pages = {page for request in batch.requests for page in request.pages}
        self.launched.append(Launched(batch, pages, self._pages_written(batch), before))

    def _pages_written(self, batch: ScheduleBatch) -> set[int]:
        written: set[int] = set()
        rows = zip(batch.requests, batch.prefix_lens, batch.extend_lens, strict=True)
        for request, start, new in rows:
            first, last = start // self.page_size, (start + new - 1) // self.page_size
            written.update(request.pages[first : last + 1])
        return written

    def look_at_loads(self) -> None:
        """Notes behind which tokens each load of this pass goes on."""
        loads = self.device.tier.loads
        places = {
            frame: (namespace, tokens[: len(tokens) - (len(frames) - at) * self.page_size])
            for (namespace, tokens), (_, frames) in self.tier_tree().items()
            for at, frame in enumerate(frames)
        }
        for load_id, load in loads.items():
            if load_id not in self.load_prefixes:
                self.load_prefixes[load_id] = places[load.frames[0]]
        for load_id in set(self.load_prefixes) - set(loads):
            del self.load_prefixes[load_id]

    def tree(self) -> dict[Prefix, tuple[Any, list[int]]]:
        """Every node by its whole prefix, walked from the roots, with its pages."""
        return self._walk(self.scheduler._memory.cache)

    def tier_tree(self) -> dict[Prefix, tuple[Any, list[int]]]:
        """The same of the tier below the pool, with its frames."""
        tier = self.scheduler._memory.tier
        return {} if tier is None else self._walk(tier.cache)

    def _walk(self, cache: RadixCache) -> dict[Prefix, tuple[Any, list[int]]]:
        found: dict[Prefix, tuple[Any, list[int]]] = {}
        for namespace, root in cache.tree.roots.items():
            stack: list[tuple[Node, tuple[int, ...]]] = [(root, ())]
            while stack:
                node, above = stack.pop()
                assert node.children or node is not root, "an empty namespace is kept"
                for child in node.children.values():
                    tokens = (*above, *memoryview(child.key).cast("i"))
                    assert len(tokens) - len(above) == len(child.pages) * self.page_size
                    assert child.parent is node
                    assert not child.dead
                    found[namespace, tokens] = (child, list(child.pages))
                    stack.append((child, tokens))
        return found

    def heads(self) -> dict[Prefix, int]:
        """Every cached page by its prefix, with its number."""
        size = self.page_size
        return {
            (name, tokens[: len(tokens) - at * size]): page
            for (name, tokens), (_, pages) in self.tree().items()
            for at, page in enumerate(reversed(pages))
        }

    def cached_pages(self) -> set[int]:
        return {page for _, pages in self.tree().values() for page in pages}

    def check(self) -> None:
        """Every invariant, from scratch."""
        allocator = self.scheduler._memory.allocator
        free = [page for part in allocator.free_slices(1000) for page in part]
        deferred = allocator.deferred()
        free_rows = self.scheduler._memory.free_rows
        tree = self.tree()
        self._check_pages(free, deferred, tree)
        self._check_written(tree)
        self.check_tier()
        self._check_locks(tree)
        self._check_rows(free_rows)
        for flight in self.launched:
            assert flight.pages.isdisjoint(free), "a launched step names a free page"

    def _check_pages(self, free: list[int], deferred: list[int], tree: dict[Any, Any]) -> None:
        filling = [page for load in self.device.tier.loads.values() for page in load.pages]
        owned: Counter[int] = Counter([0, *free, *deferred, *filling])
        cached = [page for _, pages in tree.values() for page in pages]
        owned.update(cached)
        private = 0
        for request in self.holders:
            own = [page for page in request.pages if page not in set(cached)]
            private += len(own)
            owned.update(own)
            needed = -(-request.length // self.page_size)
            assert len(request.pages) == needed, "holds other pages than its tokens need"
        pool = self.scheduler.config.capacity_tokens // self.page_size
        stats = self.scheduler.statistics()
        dead = stats.protected_tokens - sum(
            len(pages) * self.page_size for node, pages in tree.values() if node.locks
        )
        if not dead:  # else a failed step's pages wait for their last reader
            assert all(count == 1 for count in owned.values()), "a page has two owners"
            assert sorted(owned) == list(range(pool)), "a page has no owner"
            assert stats.cached_tokens == len(cached) * self.page_size
            assert stats.private_tokens == private * self.page_size
        assert stats.free_tokens == len(free) * self.page_size
        assert stats.reserved_tokens == (1 + len(deferred) + len(filling)) * self.page_size
        total = stats.free_tokens + stats.cached_tokens + stats.private_tokens
        assert total + stats.reserved_tokens == pool * self.page_size == stats.capacity_tokens

    def _check_written(self, tree: dict[Any, tuple[Any, list[int]]]) -> None:
        """Whatever could be matched is on the device: the KV of just these tokens, but for what a
        step in flight that was never run is still to write."""
        size, device = self.page_size, self.device
        to_come = {
            page
            for flight in self.launched
            if not device.has_run(flight.batch)
            for page in flight.written
        }
        for (namespace, tokens), (_, pages) in tree.items():
            chain = device.chain(namespace, tokens)
            for at, page in enumerate(reversed(pages), 1):
                first = len(tokens) - at * size
                found = [device.slots.get(page * size + i) for i in range(size)]
                right = zip(found, chain[first : first + size], strict=True)
                assert page in to_come or all(kv in (SPOILT, wanted) for kv, wanted in right), (
                    f"{first} tokens and the next {size} can be matched, whose KV is not there"
                )

    def check_tier(self) -> None:
        """Whatever of the tier could be loaded holds the KV of just its tokens; and what is being
        read from it stays there."""
        size, tier = self.page_size, self.device.tier
        tree = self.tier_tree()
        for (namespace, tokens), (_, frames) in tree.items():
            chain = self.device.chain(namespace, tokens)
            for at, frame in enumerate(reversed(frames), 1):
                first = len(tokens) - at * size
                assert tier.frames.get(frame) == list(chain[first : first + size]), (
                    f"the tier has {first} tokens and the next {size}, whose KV is not there"
                )
        kept = Counter(frame for _, frames in tree.values() for frame in frames)
        kept.update(frame for copy in tier.copies.values() for frame in copy.frames)
        assert all(count == 1 for count in kept.values()), "a frame has two owners"
        assert len(kept) <= self.scheduler.config.kv_tier_pages
        assert 0 not in kept

    def _check_locks(self, tree: dict[Any, tuple[Any, list[int]]]) -> None:
        """What requests read as part of their prefix is locked, and nothing else."""
        evictable = 0
        for (namespace, tokens), (node, pages) in tree.items():
            readers = 0
            for request in self.holders:
                history = [*request.input_ids, *request.output_ids]
                at = len(tokens) // self.page_size
                mine = list(request.pages[at - len(pages) : at])
                if mine == pages:
                    assert request.namespace == namespace
                    known = min(len(history), len(tokens))
                    assert history[:known] == list(tokens[:known])
                    readers += 1
            readers += sum(
                namespace == name and tokens == prefix[: len(tokens)]
                for load_id, (name, prefix) in self.load_prefixes.items()
                if load_id in self.device.tier.loads
            )
            assert (node.locks > 0) == (readers > 0), "locks and readers differ"
            if not readers:
                evictable += len(pages) * self.page_size
        assert self.scheduler.statistics().evictable_tokens == evictable

    def _check_rows(self, free_rows: list[int]) -> None:
        held = [request.row for request in self.holders]
        rows = self.scheduler.config.max_running_requests
        assert sorted(held + free_rows) == list(range(1, rows + 1))
        for flight in self.launched:
            for request, row in zip(flight.batch.requests, flight.batch.rows, strict=True):
                assert request.row == row, "a launched row was given away"
