"""Recounts the scheduler's books from the requests and the tree, trusting no running total.

In slices: a pool of 300,000 pages takes a tenth of a second, for which no request that comes
meanwhile is to wait.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from runtime.errors import InvariantError
from runtime.scheduling.kv_memory import match_limit
from runtime.scheduling.radix_tree import TOKEN_BYTES, Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from runtime.request import Request
    from runtime.scheduling.kv_memory import KVMemory
    from runtime.scheduling.kv_tier import KVTier
    from runtime.scheduling.page_allocator import PageAllocator
    from runtime.scheduling.radix_cache import RadixCache
    from runtime.scheduling.radix_tree import Node
    from runtime.scheduling.saved_states import SavedStates
    from runtime.scheduling.schedule_batch import ScheduleBatch

SLICE = 2048  # pages between two pauses
NODE_COST = 64  # of looking at a node, in pages


def check_books(
    memory: KVMemory, holders: Sequence[Request], launched: Sequence[ScheduleBatch]
) -> None:
    """The whole of `recount` at once."""
    for _ in recount(memory, holders, launched):
        pass


def recount(
    memory: KVMemory, holders: Sequence[Request], launched: Sequence[ScheduleBatch]
) -> Iterator[None]:
    """Checks that every page, row and lock has exactly one owner, and that tree, order of eviction
    and remembered matches are what they should be. Pauses every fraction of a millisecond; of no
    use once anything has changed meanwhile.

    Args:
        holders: every request that may hold KV, the ended ones still in flight included.
        launched: steps launched and not yet committed.

    Raises: InvariantError.
    """
    yield from _Recount(memory, holders, launched).run()


class IdleRecount:
    """A recount a slice at a time, while nothing is held and nothing in flight. A book found wrong
    is reported, and does not end a server that can go on.

    Args:
        memory: not changed.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._slices: Iterator[None] | None = None
        self._done = True
        self.error: str | None = None  # of the last recount that failed

    def books_change(self) -> None:
        """A recount under way is worth nothing any more."""
        self._slices, self._done = None, False

    def step(self) -> bool:
        """Recounts for a fraction of a millisecond; returns whether more is left."""
        if not self._done:
            self._slices = self._slices or recount(self._memory, (), ())
            try:
                next(self._slices)
            except StopIteration:
                self._done = True
            except InvariantError as error:
                self._done, self.error = True, str(error)
        return not self._done


class _CacheRecount:
    """Recounts one cache and the pages that are free for it: those of the pool, or the frames of
    the tier below it.

    Args:
        locked: ends of the prefixes that somebody holds.
    """

    def __init__(
        self, cache: RadixCache, allocator: PageAllocator, locked: Iterable[Node | None]
    ) -> None:
        self._cache = cache
        self._allocator = allocator
        self._owned = bytearray(allocator.num_pages)  # by page: somebody has it
        self._locks = _count_locks(locked)
        self._pinned: list[Node] = []
        self._pinned_below: Counter[Node] = Counter()  # by node: children that are
        self._pinned_tokens = 0
        self._left = SLICE

    def pause(self, pages: int) -> bool:
        """Whether a slice is over, another `pages` having been looked at."""
        self._left -= pages
        if self._left > 0:
            return False
        self._left = SLICE
        return True

    def own(self, pages: Iterable[int]) -> None:
        """Notes that somebody has these pages, and nobody else."""
        owned = self._owned
        for page in pages:
            if owned[page]:
                raise InvariantError(f"page {page} has more than one owner")
            owned[page] = 1

    def is_owned(self, page: int) -> bool:
        return bool(self._owned[page])

    def count_free(self) -> Iterator[None]:
        self.own([0])
        for free in self._allocator.free_slices(SLICE):
            self.own(free)
            yield

    def check_all_owned(self) -> None:
        missing = self._owned.count(0)
        _require(not missing, f"{missing} of {len(self._owned)} pages have no owner")

    def check_tree(self) -> Iterator[None]:
        """Every node of the tree, and the dead ones that have a lock; then pins, and the order of
        eviction."""
        tokens = {True: 0, False: 0}  # of nodes with locks and without
        for root in self._cache.tree.roots.values():
            known = self._cache.tree.roots.get(root.namespace) is root
            empty = not (root.pages or root.start or root.parent)
            _require(known and empty and bool(root.children), "a root is wrong")
        dead = [node for node in self._locks if node.dead]
        for node in chain(self._cache.tree.nodes(), dead):
            self.own(node.pages)
            self._check_node(node)
            tokens[node.locks > 0] += len(node.pages) * self._cache.page_size
            if node.pins:
                self._note_pinned(node)
            if self.pause(len(node.pages) + NODE_COST):
                yield
        counted = (self._cache.evictable_tokens, self._cache.protected_tokens)
        found = (tokens[False], tokens[True])
        _require(counted == found, f"evictable, protected tokens are {counted}, recounted {found}")
        yield from self._check_pins()
        yield from self._check_order()

    def _note_pinned(self, node: Node) -> None:
        assert node.parent is not None
        self._pinned.append(node)
        self._pinned_below[node.parent] += 1
        self._pinned_tokens += len(node.pages) * self._cache.page_size

    def _check_pins(self) -> Iterator[None]:
        """Pins end with nodes of the tree, and every node on the way to these is pinned."""
        counted, found = self._cache.pins.tokens, self._pinned_tokens
        _require(counted == found, f"{counted} tokens are pinned, recounted {found}")
        ends = Counter(pin.node for pin in self._cache.pins)
        strangers = set(ends).difference(self._pinned)
        _require(not strangers, f"{len(strangers)} pins end with nodes that are not pinned")
        for node in self._pinned:
            owners = ends[node] + self._pinned_below[node]
            _require(node.pins == owners, f"a node has {node.pins} pins and {owners} owners")
            if self.pause(NODE_COST):
                yield

    def _check_node(self, node: Node) -> None:
        tree, parent = self._cache.tree, node.parent
        size = tree.page_size
        assert parent is not None
        first = bytes(node.key[: size * TOKEN_BYTES])
        linked = parent.children.get(first) is node
        _require(
            (node.dead or linked)
            and node.start == parent.end
            and 0 < len(node.pages) <= tree.node_pages
            and len(node.key) == len(node.pages) * size * TOKEN_BYTES,
            f"a node of {len(node.pages)} pages is not where it should be in the tree",
        )
        pieces = [*(start for start, _ in node.pieces), node.end]
        ascending = all(a < b for a, b in pairwise(pieces))
        _require(pieces[0] == node.start and ascending, f"pieces {pieces} of a node")
        owners = self._locks[node]
        _require(
            node.locks == owners,
            f"a node of {len(node.pages)} pages has {node.locks} locks and {owners} owners",
        )
        evictable = not (node.locks or node.children or node.dead)
        rank = self._cache.rank(node) if evictable else 0
        _require(node.rank == rank, f"a node is ranked {node.rank} for eviction, not {rank}")

    def _check_order(self) -> Iterator[None]:
        last = counted = 0
        for rank, node in self._cache.order.ranked():
            _require(last < rank == node.rank, f"rank {rank} follows rank {last}")
            last = rank
            counted += 1
            if self.pause(NODE_COST):
                yield
        leaves = sum(node.rank > 0 for node in self._cache.tree.nodes())
        _require(
            counted == leaves,
            f"{counted} leaves are in the order of eviction, {leaves} in the tree",
        )


class _Recount:
    def __init__(
        self, memory: KVMemory, holders: Sequence[Request], launched: Sequence[ScheduleBatch]
    ) -> None:
        self._memory = memory
        self._holders = holders
        self._launched = launched
        locked = [holder.scheduling.node for holder in holders]
        if memory.tier is not None:
            locked += memory.tier.locked_above()
        self._pages = _CacheRecount(memory.cache, memory.allocator, locked)

    def run(self) -> Iterator[None]:
        yield from self._pages.count_free()
        self._check_launched()
        self._check_rows()
        yield from self._pages.check_tree()
        yield from self._check_holders()
        self._pages.check_all_owned()
        if self._memory.states is not None:
            self._check_states(self._memory.states)
        steps = {batch.step for batch in self._launched}
        waits = steps.issuperset(insertion.step for insertion in self._memory.insertions)
        _require(waits, "the cache waits for a step not in flight")
        if self._memory.tier is not None:
            yield from self._check_tier(self._memory.tier)

    def _check_launched(self) -> None:
        for batch in self._launched:
            for request in batch.requests:
                named = any(map(self._pages.is_owned, request.pages))
                _require(not named, "a launched step names a free page")
        self._pages.own(self._memory.allocator.deferred())
        if self._memory.tier is not None:
            self._pages.own(self._memory.tier.pages_to_fill())

    def _check_tier(self, tier: KVTier) -> Iterator[None]:
        frames = _CacheRecount(tier.cache, tier.frames, tier.locked())
        yield from frames.count_free()
        for copy in tier.write_behind.on_their_way():
            frames.own(copy.frames)
        yield from frames.check_tree()
        frames.check_all_owned()

    def _check_states(self, states: SavedStates) -> None:
        """Every slot is free, kept with the node that ends at its state, or a holder's."""
        pending = [
            state
            for holder in self._holders
            for state in holder.scheduling.saved
            if state.slot and state.node is None
        ]
        slots = [*states.free_slots(), *(state.slot for state in chain(states, pending))]
        _require(sorted(slots) == list(states.slots), f"state slots {sorted(slots)} have an owner")
        found = {node.state for node in self._memory.cache.tree.nodes() if node.state is not None}
        _require(found == set(states), "the tree has other states than are kept")
        for state in states:
            node = state.node
            ends = node is not None and node.state is state and node.end == state.position
            _require(ends, f"a state of {state.position} tokens is not at the end of its node")

    def _check_rows(self) -> None:
        held = [request.row for request in self._holders if request.row >= 0]
        rows = sorted([*self._memory.free_rows, *held])
        expected = list(range(1, self._memory.num_rows + 1))
        _require(rows == expected, f"table rows {rows} are free or held, expected {expected}")

    def _check_holders(self) -> Iterator[None]:
        memory = self._memory
        for request in self._holders:
            record = request.scheduling
            shared = record.tree_tokens // memory.page_size
            self._pages.own(request.pages[shared:])
            _require(
                record.tree_tokens == (record.node.end if record.node else 0)
                and request.pages[:shared]
                == memory.cache.pages(record.node, 0, record.tree_tokens),
                f"request {request.request_id} reads pages that the cache does not hold",
            )
            self._check_place(request)
            if self._pages.pause(len(request.pages) + NODE_COST):
                yield

    def _check_place(self, request: Request) -> None:
        """What is remembered of a prompt leads where a look from the root does."""
        record, tree = request.scheduling, self._memory.cache.tree
        remembered, fresh = record.place, Place()
        if remembered.node is None:
            return
        place = Place(remembered.node, remembered.tokens, remembered.seen)
        for looked_up in (place, fresh):
            tree.seek(looked_up, request.namespace, record.key, match_limit(request))
        same = (place.node, place.tokens) == (fresh.node, fresh.tokens)
        _require(same, f"request {request.request_id} misremembers what is cached of it")


def _count_locks(ends: Iterable[Node | None]) -> Counter[Node]:
    """Locks that every node should have: one per prefix that ends there, one per locked child.

    Args: ends: of the prefixes that somebody holds.
    """
    locks: Counter[Node] = Counter()
    for node in ends:
        while node is not None and node.parent is not None:
            locks[node] += 1
            if locks[node] > 1:
                break
            node = node.parent
    return locks


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantError(message)
