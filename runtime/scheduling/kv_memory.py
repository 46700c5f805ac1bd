"""KVMemory: the one owner of KV pages and table rows, and every way they change hands.

    request.pages:  | tree's, locked by the request | private to the request |
    tokens:         0 ................ record.tree_tokens ............. length (rounded up to P)

A request's leading pages belong to the radix cache and are kept there by the request's lock; the
others are its own. Free + cached + private + reserved = capacity at all times, where reserved is
page 0 and the pages given back while a launched step still names them.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from runtime.errors import InvariantError
from runtime.scheduling.page_allocator import PageAllocator, RowPool
from runtime.scheduling.radix_cache import NO_MATCH, TOKEN_BYTES, PrefixMatch, RadixCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.config import SchedulerConfig
    from runtime.request import Request
    from runtime.scheduling.radix_cache import Node


class KVMemory:
    """Pages and rows of all requests.

    Args:
        config: capacity, page size, rows, eviction policy, cache on or off.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.page_size = config.page_size
        self.allocator = PageAllocator(config.capacity_tokens, config.page_size)
        self.rows = RowPool(config.max_running_requests)
        self.cache = RadixCache(self.allocator, config.eviction_policy)
        self.cache_enabled = not config.disable_radix_cache
        self.stale_tables: list[Request] = []  # requests whose device table row is behind

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the pool that requests can use: whole pages without the reserved one."""
        return (self.allocator.num_pages - 1) * self.page_size

    @property
    def available_tokens(self) -> int:
        """Tokens that are free or can be made free at once."""
        return self.allocator.free_tokens + self.cache.evictable_tokens

    def new_page_tokens(self, rows: Sequence[Request]) -> int:
        """Tokens of the pages that one more token for each row needs."""
        size = self.page_size
        return sum([not request.length % size for request in rows]) * size

    def allocate(self, pages: int) -> array[int]:
        """Takes pages, evicting the shortfall. The caller has checked `available_tokens`."""
        shortfall = pages - self.allocator.free_pages
        if shortfall > 0 and self.cache.evict(shortfall) < shortfall:
            raise InvariantError(
                f"{pages} pages asked for, {self.available_tokens // self.page_size} available"
            )
        return self.allocator.allocate_pages(pages)

    def lock(self, node: Node | None) -> None:
        """Keeps a matched prefix from eviction."""
        self.cache.lock(node)

    def unlock(self, node: Node | None) -> None:
        self.cache.unlock(node)

    # A request's life

    def match(self, request: Request) -> PrefixMatch:
        """Cached prefix that a waiting request could start from. One token at least is left to
        compute, all of them where prompt logprobs are still to be given."""
        if not self.cache_enabled:
            return NO_MATCH
        limit = match_limit(request)
        return self.cache.match(request.namespace, request.scheduling.key, limit)

    def match_length(self, request: Request) -> int:
        """Tokens that `match` would find. Changes nothing."""
        if not self.cache_enabled:
            return 0
        limit = match_limit(request)
        return self.cache.match_length(request.namespace, request.scheduling.key, limit)

    def match_path(self, request: Request) -> list[Node]:
        """Nodes of the tree that the request's prefix leads through."""
        if not self.cache_enabled:
            return []
        record = request.scheduling
        return self.cache.match_path(request.namespace, record.key, match_limit(request))

    def start(self, request: Request, match: PrefixMatch) -> None:
        """Gives an admitted request its row and its cached prefix, which the caller has locked."""
        record = request.scheduling
        request.row = self.rows.allocate()
        request.pages = array("i", match.pages)
        request.length = match.tokens
        record.node = match.node
        record.tree_tokens = match.tokens
        record.synced_pages = 0

    def grow(self, request: Request, tokens: int) -> None:
        """Makes room for `tokens` more tokens and counts them as launched."""
        request.length += tokens
        missing = -(-request.length // self.page_size) - len(request.pages)
        if missing > 0:
            request.pages.extend(self.allocate(missing))
        if request.scheduling.synced_pages < len(request.pages):
            self.stale_tables.append(request)

    def share(self, request: Request, tokens: int) -> None:
        """Puts the whole pages of the first `tokens` tokens into the cache and moves the lock to
        their end. Pages that duplicate an existing path are given back and the request's own page
        list points at the tree's instead."""
        record = request.scheduling
        size = self.page_size
        tokens = tokens // size * size
        if not self.cache_enabled or tokens <= record.tree_tokens:
            return
        key = record.key[: tokens * TOKEN_BYTES]
        if len(key) < tokens * TOKEN_BYTES:
            key = request.tokens_to_prefill()[:tokens].tobytes()
        pages = request.pages[: tokens // size]
        known, path = self.cache.insert(request.namespace, key, pages, record.last_step)
        self._drop_duplicates(request, known, path)
        self.cache.lock(path.node)
        self.cache.unlock(record.node)
        record.node = path.node
        record.tree_tokens = tokens

    def _drop_duplicates(self, request: Request, known: int, path: PrefixMatch) -> None:
        record = request.scheduling
        first, last = record.tree_tokens // self.page_size, known // self.page_size
        if first >= last:
            return
        # A launched step may still write the duplicates and read them through the old table row.
        self.allocator.free_after(request.pages[first:last], record.last_step)
        request.pages[first:last] = path.pages[first:last]
        record.synced_pages = min(record.synced_pages, first)
        self.stale_tables.append(request)

    def release(self, request: Request, keep_tokens: int) -> None:
        """Takes everything from a request that no launched step names; the KV of its first
        `keep_tokens` tokens stays in the cache."""
        if request.row < 0:
            return
        record = request.scheduling
        self.share(request, min(keep_tokens, request.length))
        self.cache.unlock(record.node)
        self.allocator.free(request.pages[record.tree_tokens // self.page_size :])
        self.rows.free(request.row)
        request.row = -1
        request.pages = array("i")
        record.node = None
        record.tree_tokens = 0
        record.synced_pages = 0

    def private_tokens(self, request: Request) -> int:
        return len(request.pages) * self.page_size - request.scheduling.tree_tokens

    def releasable_tokens(self, requests: list[Request]) -> int:
        """Tokens that would become available if all of `requests` were released."""
        total = sum(self.private_tokens(request) for request in requests)
        locks: dict[Node, int] = {}
        for request in requests:
            node = request.scheduling.node
            while node is not None and node.parent is not None:
                locks[node] = locks.get(node, 0) + 1
                node = node.parent
        return total + sum(
            len(node.pages) * self.page_size for node, count in locks.items() if count == node.locks
        )


def match_limit(request: Request) -> int:
    """Most tokens of a request that may come from the cache."""
    record = request.scheduling
    if request.sampling.prompt_logprobs is not None and not request.output_ids:
        return 0
    return len(record.key) // TOKEN_BYTES - 1
