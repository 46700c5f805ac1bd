"""Recounts the scheduler's books from the requests and the tree, trusting no running total."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from runtime.errors import InvariantError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.request import Request
    from runtime.scheduling.kv_memory import KVMemory
    from runtime.scheduling.radix_cache import Node, RadixCache
    from runtime.scheduling.schedule_batch import ScheduleBatch


def check_books(
    memory: KVMemory, holders: Sequence[Request], launched: Sequence[ScheduleBatch]
) -> None:
    """Checks that every page, row and lock has exactly one owner.

    Args:
        holders: every request that may hold KV, the ended ones still in flight included.
        launched: steps launched and not yet committed.

    Raises: InvariantError.
    """
    _check_pages(memory, holders, launched)
    _check_rows(memory, holders)
    _check_locks(memory.cache, holders)


def _check_pages(
    memory: KVMemory, holders: Sequence[Request], launched: Sequence[ScheduleBatch]
) -> None:
    free, deferred = memory.allocator.snapshot()
    owners: Counter[int] = Counter([0, *free, *deferred])
    tree: set[int] = set()
    for node in _all_nodes(memory.cache, holders):
        owners.update(node.pages)
        tree.update(node.pages)
    for request in holders:
        shared = request.scheduling.tree_tokens // memory.page_size
        owners.update(request.pages[shared:])
        _require(
            tree.issuperset(request.pages[:shared]),
            f"request {request.request_id} reads pages that the cache does not hold",
        )
    twice = [page for page, count in owners.items() if count != 1]
    _require(not twice, f"pages with more than one owner: {twice[:8]}")
    missing = memory.allocator.num_pages - len(owners)
    _require(not missing, f"{missing} of {memory.allocator.num_pages} pages have no owner")
    named = {page for batch in launched for request in batch.requests for page in request.pages}
    _require(named.isdisjoint(free), "a launched step names a free page")


def _check_rows(memory: KVMemory, holders: Sequence[Request]) -> None:
    free = memory.rows.snapshot()
    rows = sorted([*free, *(request.row for request in holders if request.row >= 0)])
    expected = list(range(1, memory.rows.num_rows + 1))
    _require(rows == expected, f"table rows {rows} are free or held, expected {expected}")


def _check_locks(cache: RadixCache, holders: Sequence[Request]) -> None:
    locks: Counter[Node] = Counter()
    for request in holders:
        node = request.scheduling.node
        while node is not None and node.parent is not None:
            locks[node] += 1
            node = node.parent
    evictable = protected = 0
    for node in _all_nodes(cache, holders):
        _require(
            node.locks == locks[node],
            f"a node of {len(node.pages)} pages has {node.locks} locks and {locks[node]} owners",
        )
        tokens = len(node.pages) * cache.page_size
        if node.locks:
            protected += tokens
        else:
            evictable += tokens
    counted = (cache.evictable_tokens, cache.protected_tokens)
    _require(
        counted == (evictable, protected),
        f"evictable, protected tokens are {counted}, recounted {(evictable, protected)}",
    )


def _all_nodes(cache: RadixCache, holders: Sequence[Request]) -> set[Node]:
    """Nodes in the tree, and dead ones that still have a lock."""
    nodes = set(cache.nodes())
    for request in holders:
        node = request.scheduling.node
        while node is not None and node.parent is not None:
            nodes.add(node)
            node = node.parent
    return nodes


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantError(message)
