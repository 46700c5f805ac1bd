"""WriteBehind: which finished pages of the prefix cache are copied to the tier below it, and when.

A page is ordered as soon as its KV is known to be finite, and not when it is evicted: so no
eviction waits for a copy. Pages that leave the cache before their copy is done are not kept there.

What is known to be finite: a NaN shows only when its prompt is to give a token, and the pages of
its earlier chunks are in the cache by then. So a page counts as unverified until the request that
wrote it, or one that was admitted with it as its prefix, has given a token in a step that is
committed.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.scheduling.radix_tree import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from runtime.request import Request
    from runtime.scheduling.page_allocator import PageAllocator
    from runtime.scheduling.radix_cache import RadixCache
    from runtime.scheduling.radix_tree import Node

PIECE_TOKENS = 1024  # of a copy at most, in whole pages: what a load may have to wait for
MAX_COPIES = 4  # on their way at once
MAX_ORDERS = 1024  # of which later ones are given up
NO_FRAME = 0  # before the first page of a prompt; never handed out


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Pages to be copied from the device to frames of the tier.

    Args:
        pages, frames: parallel; the pages follow one another in one prompt.
        before: frame of the page before them, NO_FRAME where they begin the prompt.
        token_ids: of these pages. namespace: of the prompt.
    """

    copy_id: int
    pages: array[int]
    frames: array[int]
    before: int
    namespace: str
    token_ids: array[int]


@dataclass(slots=True, eq=False)
class _Order:
    """Pages that are to be copied.

    Args:
        key: bytes of the tokens up to their end. first: pages before those left.
        pages: on the device, of those left, as long as they are cached.
        after: what they continue is part of this order.
        copy: the piece on its way. below: where it will hang in the tier, locked.
    """

    namespace: str
    key: bytes
    first: int
    pages: array[int]
    after: _Order | None
    copy: PageCopy | None = None
    below: Node | None = None
    done: bool = False


class WriteBehind:
    """Orders and copies.

    Args:
        tier: what is in the tier, by frame. frames: those that are free.
    """

    def __init__(self, tier: RadixCache, frames: PageAllocator) -> None:
        self._tier = tier
        self._frames = frames
        self._page_bytes = tier.page_size * TOKEN_BYTES
        self._unverified: dict[int, int] = {}  # by page: who wrote it
        self._orders: dict[_Order, None] = {}  # oldest first
        self._order_of: dict[int, _Order] = {}  # by page
        self._copies: dict[int, _Order] = {}  # by id
        self._next_id = 0

    @property
    def pending(self) -> bool:
        """Whether anything is left to copy, or on its way."""
        return bool(self._orders)

    def wrote(self, pages: array[int], request: Request) -> None:
        """A request that has given no token yet put pages into the cache."""
        self._unverified.update(dict.fromkeys(pages, request.scheduling.seq))

    def is_verified(self, page: int) -> bool:
        """Whether a cached page is committed, and known to be finite."""
        return page not in self._unverified

    def mark_verified(self, request: Request) -> None:
        """A request has given a token: what it wrote and read is finite. Orders its cached pages
        that are neither in the tier nor ordered yet."""
        record, size = request.scheduling, self._tier.page_size
        pages = request.pages[: record.tree_tokens // size]
        if self._unverified:
            self._verify(pages, record.prefix_tokens // size, record.seq)
        key = request.tokens_between(0, record.tree_tokens).tobytes()
        known = self._tier.match(request.namespace, key, record.tree_tokens)
        first = known.tokens // size
        after = None
        while first < len(pages) and (order := self._order_of.get(pages[first])) is not None:
            after = order
            first += 1
        last = first
        while last < len(pages) and self._is_free(pages[last]):
            last += 1
        if last > first and len(self._orders) < MAX_ORDERS:
            key = key[: last * self._page_bytes]
            order = _Order(request.namespace, key, first, pages[first:last], after)
            self._orders[order] = None
            self._order_of.update(dict.fromkeys(order.pages, order))

    def _verify(self, pages: array[int], read: int, writer: int) -> None:
        unverified = self._unverified
        for at, page in enumerate(pages):
            # A duplicate that has taken the place of its own page is another's: it has not read it.
            if page in unverified and (at < read or unverified[page] == writer):
                del unverified[page]

    def _is_free(self, page: int) -> bool:
        return page not in self._unverified and page not in self._order_of

    def removed(self, pages: Iterable[int]) -> None:
        """Pages left the cache: they may be written to from now on."""
        for page in pages:
            self._unverified.pop(page, None)
            order = self._order_of.get(page)
            if order is not None:
                at = order.pages.index(page)
                for lost in order.pages[at:]:
                    del self._order_of[lost]
                del order.pages[at:]
                self._look_at_end(order)

    def cleared(self) -> None:
        """The cache was emptied."""
        self.removed([*self._unverified, *self._order_of])

    def name_copies(self) -> list[PageCopy]:
        """The copies to be begun now."""
        named = []
        for order in list(self._orders):
            if len(self._copies) >= MAX_COPIES:
                break
            if order.copy is None and (order.after is None or order.after.done):
                order.after = None
                copy = self._name(order)
                if copy is not None:
                    named.append(copy)
        return named

    def _name(self, order: _Order) -> PageCopy | None:
        tier, size = self._tier, self._tier.page_size
        tokens = order.first * size
        match = tier.match(order.namespace, order.key, tokens)
        if match.tokens < tokens:
            self._give_up(order)  # what it continues has left the tier
            return None
        tier.lock(match.node)
        piece = max(PIECE_TOKENS // size, 1)
        frames = self._take_frames(min(len(order.pages), piece))
        if not frames:
            tier.unlock(match.node)
            self._give_up(order)
            return None
        before = tier.pages(match.node, tokens - size, tokens)[0] if tokens else NO_FRAME
        end = (order.first + len(frames)) * self._page_bytes
        order.below = match.node
        order.copy = PageCopy(
            self._next_id,
            order.pages[: len(frames)],
            frames,
            before,
            order.namespace,
            array("i", order.key[order.first * self._page_bytes : end]),
        )
        self._copies[self._next_id] = order
        self._next_id += 1
        return order.copy

    def _take_frames(self, count: int) -> array[int]:
        missing = count - self._frames.free_pages
        if missing > 0:
            count -= missing - self._tier.evict(missing)
        return self._frames.allocate_pages(count)

    def pages_of_copy(self, copy_id: int) -> int:
        """Pages of a copy that is on its way."""
        copy = self._copies[copy_id].copy
        assert copy is not None
        return len(copy.pages)

    def stored(self, copy_id: int, count: int) -> int:
        """A copy is done: its first `count` pages were read. Returns how many of them were cached
        all the while: the others may hold anything, and nobody will ask for them."""
        order = self._copies.pop(copy_id)
        copy, below = order.copy, order.below
        assert copy is not None
        good = min(count, len(copy.pages), len(order.pages))
        if below is not None and below.dead:
            good = 0
        if good:
            first = order.first * self._page_bytes
            key = order.key[first : first + good * self._page_bytes]
            known, _ = self._tier.insert(order.namespace, key, copy.frames[:good], below)
            # Another copy of the same tokens was sooner.
            self._frames.free(copy.frames[: known // self._tier.page_size])
        self._frames.free(copy.frames[good:])
        self._tier.unlock(below)
        order.copy, order.below = None, None
        for page in order.pages[:good]:
            del self._order_of[page]
        del order.pages[:good]
        order.first += good
        if good < len(copy.pages):
            self._give_up(order)
        self._look_at_end(order)
        return good

    def _give_up(self, order: _Order) -> None:
        for page in order.pages:
            del self._order_of[page]
        del order.pages[:]
        self._look_at_end(order)

    def _look_at_end(self, order: _Order) -> None:
        if not order.pages and order.copy is None:
            order.done = True
            self._orders.pop(order, None)

    def on_their_way(self) -> Iterator[PageCopy]:
        """Copies that were named and are not done."""
        for order in self._copies.values():
            assert order.copy is not None
            yield order.copy

    def locked(self) -> Iterator[Node]:
        """Where copies will hang in the tier: a lock for each."""
        for order in self._copies.values():
            if order.below is not None:
                yield order.below
