"""KVTier: KV that is kept below the pool, in host memory or a file, and comes back by a load.

    finished pages --copies (write-behind)--> frames of the tier --loads--> pages of the pool

The tier has frames of one page each, and a radix tree of its own, which says of which prefixes the
KV is in which frame. A prompt whose cached prefix goes on in the tier waits (`kv_load`) while that
is loaded into pages set aside for it; once loaded it is cached like any other. What could not be
read is forgotten, and computed.

Nothing here copies anything: a pass names copies and loads, and whoever performs them tells of
their end (`stored`, `loaded`). No pass waits for either.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from runtime.errors import InvariantError
from runtime.scheduling.page_allocator import PageAllocator
from runtime.scheduling.radix_cache import RadixCache
from runtime.scheduling.radix_tree import TOKEN_BYTES
from runtime.scheduling.write_behind import WriteBehind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from runtime.config import SchedulerConfig
    from runtime.request import Request
    from runtime.scheduling.radix_cache import PrefixMatch
    from runtime.scheduling.radix_tree import Node


@dataclass(frozen=True, slots=True)
class PageLoad:
    """Frames of the tier to be copied into pages of the device. Args: frames, pages: parallel."""

    load_id: int
    frames: array[int]
    pages: array[int]


@dataclass(frozen=True, slots=True)
class TierPrefix:
    """A prefix that was in the tier before the scheduler began.

    Args:
        token_ids: from the first on, whole pages. frames: one for each page.
    """

    namespace: str
    token_ids: array[int]
    frames: array[int]


@dataclass(slots=True, eq=False)
class _Load:
    """A load that was decided on.

    Args:
        start: tokens of the request that were cached; below: their end, locked.
        node: the end of what is loaded, in the tier, locked.
        pages: where it goes; empty until the pass is over.
    """

    request: Request
    start: int
    below: Node | None
    node: Node
    frames: array[int]
    pages: array[int]


class Pool(Protocol):
    """What the tier needs of the pool above it."""

    cache: RadixCache
    allocator: PageAllocator

    def allocate(self, pages: int) -> array[int]: ...
    def take_loaded(
        self, namespace: str, key: bytes, pages: array[int], below: Node | None
    ) -> None: ...


class KVTier:
    """What is in the tier, and on its way there and back.

    Args:
        config: how many pages it holds, and how many tokens are worth a load.
        pool: whose pages are copied and loaded into.
    """

    def __init__(self, config: SchedulerConfig, pool: Pool) -> None:
        size = self._page_size = config.page_size
        self._pool = pool
        self._least_tokens = max(config.kv_load_tokens, size)
        self.frames = PageAllocator((config.kv_tier_pages + 1) * size, size)
        self.cache = RadixCache(self.frames)
        self.write_behind = WriteBehind(self.cache, self.frames)
        self._loading: dict[Request, _Load] = {}
        self._booked: list[_Load] = []  # in this pass, and without pages yet
        self._named: list[PageLoad] = []  # in this pass
        self._loads: dict[int, _Load] = {}  # on their way, by id
        self._read: set[int] = set()  # frames that are being loaded
        self._next_id = 0
        pool.cache.watchers.append(self.write_behind)

    @property
    def tokens(self) -> int:
        """What it holds."""
        return self.cache.evictable_tokens + self.cache.protected_tokens

    @property
    def loading_pages(self) -> int:
        """Pages of the pool that loads are to fill."""
        return sum([len(load.pages) for load in self._loads.values()])

    @property
    def loading(self) -> int:
        """Loads that were decided on and are not done."""
        return len(self._booked) + len(self._loads)

    def adopt(self, prefixes: Iterable[TierPrefix]) -> None:
        """Takes over what was in the tier before, the oldest first. Nothing has been put into it
        yet.

        Raises: InvariantError: a frame that the tier does not have.
        """
        prefixes = list(prefixes)
        taken = {frame for prefix in prefixes for frame in prefix.frames}
        every = self.frames.allocate_pages(self.frames.free_pages)
        if not taken.issubset(every):
            raise InvariantError("the tier is said to hold more than it has frames")
        self.frames.free([frame for frame in every if frame not in taken])
        for prefix in prefixes:
            self.cache.insert(prefix.namespace, prefix.token_ids.tobytes(), prefix.frames)

    def is_loading(self, request: Request) -> bool:
        """Whether a load for a waiting request is on its way."""
        return request in self._loading

    def find(self, request: Request, match: PrefixMatch, limit: int) -> PrefixMatch | None:
        """How far a waiting request's prefix goes on in the tier; None where that is not worth a
        load, or it has had one already.

        Args:
            match: what is cached of it. limit: most tokens that may be.
        """
        record, size = request.scheduling, self._page_size
        if record.load_tried or limit - match.tokens < self._least_tokens:
            return None
        found = self.cache.match(request.namespace, record.key, limit)
        if found.tokens - match.tokens < self._least_tokens:
            return None
        if match.tokens:
            # Where a step in flight may still take it back, nothing can be hung below it.
            (last,) = self._pool.cache.pages(match.node, match.tokens - size, match.tokens)
            if not self.write_behind.is_verified(last):
                return None
        return found

    def is_read(self, match: PrefixMatch, found: PrefixMatch) -> bool:
        """Whether what `found` adds to `match` is being loaded for somebody else."""
        first = self.cache.pages(found.node, match.tokens, match.tokens + self._page_size)
        return first[0] in self._read

    def book(self, request: Request, match: PrefixMatch, found: PrefixMatch) -> None:
        """Decides on a load; the caller has locked `match` and set tokens aside."""
        assert found.node is not None
        request.scheduling.load_tried = True
        self.cache.lock(found.node)
        frames = self.cache.pages(found.node, match.tokens, found.tokens)
        load = _Load(request, match.tokens, match.node, found.node, frames, array("i"))
        self._booked.append(load)
        self._loading[request] = load
        self._read.update(frames)

    def take_pages(self) -> None:
        """Takes the pages that were set aside, once nothing more is looked up in this pass."""
        for load in self._booked:
            load.pages = self._pool.allocate(len(load.frames))
            self._loads[self._next_id] = load
            self._named.append(PageLoad(self._next_id, load.frames, load.pages))
            self._next_id += 1
        self._booked.clear()

    def take_loads(self) -> list[PageLoad]:
        """The loads decided on in this pass, to be begun now."""
        named, self._named = self._named, []
        return named

    def pages_of_load(self, load_id: int) -> int:
        """Pages of a load that is on its way."""
        return len(self._loads[load_id].pages)

    def loaded(self, load_id: int, count: int) -> int:
        """A load is done: its first `count` pages hold what they should, and are cached from now
        on. The others are forgotten. Returns the tokens that were loaded."""
        load = self._loads.pop(load_id)
        del self._loading[load.request]
        self._read.difference_update(load.frames)
        good = min(count, len(load.frames))
        if good < len(load.frames) and not load.node.dead:
            self.cache.drop(load.node, load.start + good * self._page_size)
        self.cache.unlock(load.node)
        self._pool.allocator.free(load.pages[good:])
        tokens = good * self._page_size
        first, end = load.start * TOKEN_BYTES, (load.start + tokens) * TOKEN_BYTES
        self._pool.take_loaded(
            load.request.namespace,
            load.request.scheduling.key[first:end],
            load.pages[:good],
            load.below,
        )
        return tokens

    def clear(self) -> None:
        """Forgets all; nothing is being loaded. What is on its way there is not kept."""
        self.write_behind.cleared()
        for node in list(self.cache.tree.roots.values()):
            for below in list(node.children.values()):
                self.cache.drop(below, 0)

    def locked_above(self) -> Iterator[Node]:
        """Where loads will hang in the pool's cache: a lock for each."""
        for load in self._loads.values():
            if load.below is not None:
                yield load.below

    def pages_to_fill(self) -> Iterator[int]:
        """Pages of the pool that loads are to fill."""
        for load in self._loads.values():
            yield from load.pages

    def locked(self) -> Iterator[Node]:
        """Nodes of the tier that loads and copies hold: a lock for each."""
        for load in self._loads.values():
            yield load.node
        yield from self.write_behind.locked()
