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
    from runtime.scheduling.radix_tree import Node
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


class _Recount:
    def __init__(
        self, memory: KVMemory, holders: Sequence[Request], launched: Sequence[ScheduleBatch]
    ) -> None:
        self._memory = memory
        self._cache = memory.cache
        self._holders = holders
        self._launched = launched
        self._owned = bytearray(memory.allocator.num_pages)  # by page: somebody has it
        self._locks = _count_locks(holders)
        self._left = SLICE

    def run(self) -> Iterator[None]:
        yield from self._count_free()
        self._check_rows()
        yield from self._check_tree()
        yield from self._check_pins()
        yield from self._check_order()
        yield from self._check_holders()
        missing = self._owned.count(0)
        _require(not missing, f"{missing} of {len(self._owned)} pages have no owner")
        steps = {batch.step for batch in self._launched}
        waits = steps.issuperset(insertion.step for insertion in self._memory.insertions)
        _require(waits, "the cache waits for a step not in flight")

    def _pause(self, pages: int) -> bool:
        """Whether a slice is over, another `pages` having been looked at."""
        self._left -= pages
        if self._left > 0:
            return False
        self._left = SLICE
        return True

    def _own(self, pages: Iterable[int]) -> None:
        owned = self._owned
        for page in pages:
            if owned[page]:
                raise InvariantError(f"page {page} has more than one owner")
            owned[page] = 1

    def _count_free(self) -> Iterator[None]:
        self._own([0])
        allocator = self._memory.allocator
        for free in allocator.free_slices(SLICE):
            self._own(free)
            yield
        for batch in self._launched:
            for request in batch.requests:
                named = any(map(self._owned.__getitem__, request.pages))
                _require(not named, "a launched step names a free page")
        self._own(allocator.deferred())

    def _check_rows(self) -> None:
        held = [request.row for request in self._holders if request.row >= 0]
        rows = sorted([*self._memory.free_rows, *held])
        expected = list(range(1, self._memory.num_rows + 1))
        _require(rows == expected, f"table rows {rows} are free or held, expected {expected}")

    def _check_tree(self) -> Iterator[None]:
        """Every node of the tree, and the dead ones that have a lock."""
        tokens = {True: 0, False: 0}  # of nodes with locks and without
        for root in self._cache.tree.roots.values():
            known = self._cache.tree.roots.get(root.namespace) is root
            empty = not (root.pages or root.start or root.parent)
            _require(known and empty and bool(root.children), "a root is wrong")
        dead = [node for node in self._locks if node.dead]
        for node in chain(self._cache.tree.nodes(), dead):
            self._own(node.pages)
            self._check_node(node)
            tokens[node.locks > 0] += len(node.pages) * self._memory.page_size
            if self._pause(len(node.pages) + NODE_COST):
                yield
        counted = (self._cache.evictable_tokens, self._cache.protected_tokens)
        found = (tokens[False], tokens[True])
        _require(counted == found, f"evictable, protected tokens are {counted}, recounted {found}")

    def _check_pins(self) -> Iterator[None]:
        """Pins end with nodes of the tree, and every node on the way to these is pinned."""
        pins = self._cache.pins
        ends = Counter(pin.node for pin in pins)
        children: Counter[Node] = Counter()
        pinned: list[Node] = []
        tokens = 0
        for node in self._cache.tree.nodes():
            if node.pins:
                assert node.parent is not None
                pinned.append(node)
                children[node.parent] += 1
                tokens += len(node.pages) * self._memory.page_size
            if self._pause(NODE_COST):
                yield
        _require(tokens == pins.tokens, f"{pins.tokens} tokens are pinned, recounted {tokens}")
        strangers = set(ends).difference(pinned)
        _require(not strangers, f"{len(strangers)} pins end with nodes that are not pinned")
        for node in pinned:
            owners = ends[node] + children[node]
            _require(node.pins == owners, f"a node has {node.pins} pins and {owners} owners")
            if self._pause(NODE_COST):
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
            if self._pause(NODE_COST):
                yield
        leaves = sum(node.rank > 0 for node in self._cache.tree.nodes())
        _require(
            counted == leaves,
            f"{counted} leaves are in the order of eviction, {leaves} in the tree",
        )

    def _check_holders(self) -> Iterator[None]:
        memory = self._memory
        for request in self._holders:
            record = request.scheduling
            shared = record.tree_tokens // memory.page_size
            self._own(request.pages[shared:])
            _require(
                record.tree_tokens == (record.node.end if record.node else 0)
                and request.pages[:shared] == self._cache.pages(record.node, 0, record.tree_tokens),
                f"request {request.request_id} reads pages that the cache does not hold",
            )
            self._check_place(request)
            if self._pause(len(request.pages) + NODE_COST):
                yield

    def _check_place(self, request: Request) -> None:
        """What is remembered of a prompt leads where a look from the root does."""
        record, tree = request.scheduling, self._cache.tree
        remembered, fresh = record.place, Place()
        if remembered.node is None:
            return
        place = Place(remembered.node, remembered.tokens, remembered.seen)
        for looked_up in (place, fresh):
            tree.seek(looked_up, request.namespace, record.key, match_limit(request))
        same = (place.node, place.tokens) == (fresh.node, fresh.tokens)
        _require(same, f"request {request.request_id} misremembers what is cached of it")


def _count_locks(holders: Sequence[Request]) -> Counter[Node]:
    """Locks that every node should have: one per prefix that ends there, one per locked child."""
    locks: Counter[Node] = Counter()
    for request in holders:
        node = request.scheduling.node
        while node is not None and node.parent is not None:
            locks[node] += 1
            if locks[node] > 1:
                break
            node = node.parent
    return locks


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantError(message)
