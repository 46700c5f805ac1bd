"""KVMemory: the one owner of KV pages and table rows, and every way they change hands.

    request.pages:  | tree's, locked by the request | private to the request |
    tokens:         0 ................ record.tree_tokens ............. length (rounded up to P)

A request's leading pages belong to the radix cache and are kept there by the request's lock; the
others are its own. Free + cached + private + reserved = capacity at all times, where reserved is
page 0, the pages given back while a launched step still names them, and those that are being
loaded from the tier below.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.errors import InvariantError
from runtime.scheduling.cache_events import ROOT, CacheEvents
from runtime.scheduling.kv_tier import KVTier
from runtime.scheduling.page_allocator import PageAllocator, pages_for, whole_pages
from runtime.scheduling.pins import NO_KEY
from runtime.scheduling.radix_cache import NO_MATCH, PrefixMatch, RadixCache
from runtime.scheduling.radix_tree import TOKEN_BYTES, Place
from runtime.scheduling.saved_states import SavedStates

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from runtime.config import SchedulerConfig
    from runtime.request import Request
    from runtime.scheduling.radix_tree import Node


@dataclass(frozen=True, slots=True)
class Insertion:
    """What `insert` changed while the step that writes the pages was not committed.

    Args:
        step: the last launched step that names the request.
        tree_tokens: what the request had in the tree before.
        own: its pages for the tokens that it then found there, which gave way to the tree's.
    """

    request: Request
    step: int
    tree_tokens: int
    own: array[int]


class KVMemory:
    """Pages and rows of all requests.

    Args:
        config: capacity, page size, rows, eviction policy, cache on or off.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.page_size = config.page_size
        self.allocator = PageAllocator(config.capacity_tokens, config.page_size)
        # Rows of the block table, last in first out; padding has row 0.
        self.num_rows = config.max_running_requests
        self.free_rows = list(range(self.num_rows, 0, -1))
        self.cache_enabled = not config.disable_radix_cache
        self.states = _saved_states(config) if config.recurrent and self.cache_enabled else None
        self.cache = RadixCache(self.allocator, config.eviction_policy, states=self.states)
        self.configure(config)
        self.stale_tables: list[Request] = []  # requests whose device table row is behind
        self.insertions: list[Insertion] = []  # of steps not committed, oldest first
        self.events: CacheEvents | None = None
        tiered = self.cache_enabled and config.kv_tier_pages > 0
        self.tier = KVTier(config, self) if tiered else None
        most = pages_for(config.context_length, config.page_size) + 1
        longest = min(self.allocator.num_pages, most)
        self._indices = array("i", range(longest))

    def configure(self, config: SchedulerConfig) -> None:
        """Takes new options."""
        self.cache.set_eviction_policy(config.eviction_policy)
        self.cache.pins.bound(int(config.pin_share * config.usable_tokens))

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

    def watch(self) -> CacheEvents:
        """Starts to tell of the cache, in which nothing may be yet."""
        self.events = CacheEvents(self.page_size)
        self.cache.watchers.append(self.events)
        return self.events

    def match(self, request: Request) -> PrefixMatch:
        """Cached prefix that a waiting request could start from; counts as a sign of life. One
        token at least is left to compute, all where prompt logprobs are still to be given."""
        if not self.cache_enabled:
            return NO_MATCH
        record = request.scheduling
        limit = match_limit(request)
        return self.cache.match(request.namespace, record.key, limit, record.place)

    def look_up(self, request: Request, most_visits: int) -> int:
        """Brings `record.place` up to date, for the order of the queue: what `match` would find,
        or, with a walk cut short, a part of it. Returns the nodes visited."""
        if not self.cache_enabled:
            return 0
        record, tree = request.scheduling, self.cache.tree
        before = tree.visits
        limit = match_limit(request)
        tree.seek(record.place, request.namespace, record.key, limit, most_visits)
        return tree.visits - before

    def whole_match(self, request: Request, following: int) -> PrefixMatch | None:
        """How much of a request's tokens is cached, also of those that it has to compute itself;
        None unless `following` more tokens come behind that, or where they stay its own."""
        if not self.cache_enabled or request.scheduling.isolated:
            return None
        record, tree = request.scheduling, self.cache.tree
        tokens = len(record.key) // TOKEN_BYTES
        tree.seek(record.place, request.namespace, record.key, tokens)
        if record.place.tokens + following > tokens:
            return None
        return PrefixMatch(record.place.tokens, self.cache.end_at(record.place))

    def pending_match(self, request: Request, match: PrefixMatch) -> PrefixMatch:
        """How much of a waiting request is cached, whether or not it can go on from there.

        Args: match: what it can go on from, as `match` has just found it.
        """
        if self.states is None:
            return match
        place = request.scheduling.place
        return PrefixMatch(place.tokens, self.cache.end_at(place))

    def left_by(self, victims: Iterable[Request], request: Request, cached: int) -> int:
        """How much more of a waiting request would be cached if the victims were retracted: what
        they have computed of the same tokens. Args: cached: tokens that are already."""
        tree, key = self.cache.tree, request.scheduling.key
        end = min(match_limit(request) * TOKEN_BYTES, len(key))
        found, following = cached, cached + self.page_size
        # Victims leave no recurrent state where they stand; what they have saved is cached already.
        for victim in victims if self.cache_enabled and self.states is None else ():
            if victim.namespace != request.namespace or victim.scheduling.isolated:
                continue
            # One page tells of nearly all that they have no more in common.
            page = victim.tokens_between(cached, following).tobytes()
            if key.startswith(page, cached * TOKEN_BYTES):
                theirs = victim.tokens_between(0, victim.length).tobytes()
                found = max(found, tree.shared_bytes(theirs, key, 0, end) // TOKEN_BYTES)
        return found - cached

    def start(self, request: Request, match: PrefixMatch) -> None:
        """Gives an admitted request its row and its cached prefix, which the caller has locked."""
        record = request.scheduling
        request.row = self.free_rows.pop()
        request.pages = self.cache.pages(match.node, 0, match.tokens)
        request.length = match.tokens
        self.cache.count_use(match.node)
        record.node = match.node
        record.tree_tokens = match.tokens
        # What it finds the second time it may have computed itself, before it had to make way.
        record.matched_tokens = min(match.tokens, request.cached_tokens)
        record.borrows = match.tokens > 0
        record.synced_pages = 0
        record.prefix_tokens = match.tokens
        record.verified = record.load_tried = False
        record.saved = []

    def grow(self, request: Request, tokens: int) -> None:
        """Makes room for `tokens` more tokens and counts them as launched."""
        request.length += tokens
        missing = pages_for(request.length, self.page_size) - len(request.pages)
        if missing > 0:
            request.pages.extend(self.allocate(missing))
        if request.scheduling.synced_pages < len(request.pages):
            self.stale_tables.append(request)

    def insert(self, request: Request, tokens: int) -> None:
        """Puts the whole pages of the first `tokens` tokens into the cache and moves the lock to
        their end. Pages that duplicate an existing path are given back and the request's own page
        list points at the tree's instead."""
        record, size = request.scheduling, self.page_size
        first, tokens = record.tree_tokens, tokens // size * size
        if not self.cache_enabled or tokens <= first or record.isolated:
            return
        key = request.tokens_between(first, tokens).tobytes()
        pages = request.pages[first // size : tokens // size]
        known, end = self.cache.insert(request.namespace, key, pages, record.node)
        own = pages[: known // size]
        if own:
            record.borrows = True
            self._drop_duplicates(request, own, self.cache.pages(end, first, first + known))
        new = pages[known // size :]
        if self.events is not None and new:
            written = record.last_step
            self._tell_stored(request.namespace, first + known, end, new, key, written)
        if self.tier is not None and not record.verified:
            self.tier.write_behind.wrote(new, request)
        self.cache.move_lock(record.node, end)
        if record.last_step > self.allocator.done_step:
            self.insertions.append(Insertion(request, record.last_step, first, own))
        if record.matched_tokens == first:
            record.matched_tokens += known
        record.node = end
        record.tree_tokens = tokens
        record.place = Place(end, tokens, self.cache.tree.losses)
        if self.states is not None:
            self.states.attach(request, self.cache.above)

    def take_loaded(
        self, namespace: str, key: bytes, pages: array[int], below: Node | None
    ) -> None:
        """Puts pages that were loaded from the tier into the cache.

        Args:
            key: bytes of their tokens.
            below: the end of the prefix that they continue, locked; the lock is given back.
        """
        if below is not None and below.dead:
            self.allocator.free(pages)
        elif pages:
            known, end = self.cache.insert(namespace, key, pages, below)
            duplicates = known // self.page_size
            self.allocator.free(pages[:duplicates])
            if self.events is not None and duplicates < len(pages):
                first = end.end - (len(pages) - duplicates) * self.page_size
                self._tell_stored(namespace, first, end, pages[duplicates:], key, written=-1)
        self.cache.unlock(below)

    def _tell_stored(
        self,
        namespace: str,
        first: int,
        end: Node,
        pages: array[int],
        key: bytes,
        written: int,
    ) -> None:
        """Tells of pages that are new in the tree.

        Args: first: tokens before them. written: by this step.
        """
        assert self.events is not None
        size = self.page_size
        before = self.cache.pages(end, first - size, first) if first else [ROOT]
        new = key[-len(pages) * size * TOKEN_BYTES :]
        self.events.stored(before[0], namespace, new, pages, written, self.allocator.done_step)

    def _drop_duplicates(self, request: Request, own: array[int], kept: array[int]) -> None:
        """Puts the tree's pages in the place of a request's own behind those it has there."""
        record = request.scheduling
        first = record.tree_tokens // self.page_size
        # A launched step may still write the duplicates and read them through the old table row.
        self.allocator.free_after(own, record.last_step)
        request.pages[first : first + len(kept)] = kept
        self.out_of_date(request, first)

    def out_of_date(self, request: Request, first: int) -> None:
        """The device's row of the table does not hold the request's pages from `first` on."""
        record = request.scheduling
        record.synced_pages = min(record.synced_pages, first)
        self.stale_tables.append(request)

    def step_done(self, step: int) -> None:
        """A step is committed: what it put into the cache stays, what waited for it is free."""
        self.allocator.step_done(step)
        if self.states is not None:
            self.states.step_done(step)
        if self.events is not None:
            self.events.step_done(step)
        if self.insertions:
            self.insertions = [made for made in self.insertions if made.step > step]

    def take_back_insertions(self, step: int) -> None:
        """Undoes what was put into the cache of the KV that a launched step, or a later one, was to
        write, newest first: the pages are their requests' own again. Saved states go."""
        if self.states is not None:
            self.states.take_back(step)
        while self.insertions and self.insertions[-1].step >= step:
            self._take_out(self.insertions.pop())

    def _take_out(self, insertion: Insertion) -> None:
        request, record = insertion.request, insertion.request.scheduling
        if self.is_lost(request):
            return  # it starts anew, or ends, and gives back what it has as it is
        known = insertion.tree_tokens + len(insertion.own) * self.page_size
        end, before = record.node, self.cache.above(record.node, insertion.tree_tokens)
        self.cache.move_lock(end, before)
        if end is not None and record.tree_tokens > known:
            self.cache.take_back(end, known)
        record.node, record.tree_tokens = before, insertion.tree_tokens
        record.matched_tokens = min(record.matched_tokens, insertion.tree_tokens)
        if insertion.own:
            first = insertion.tree_tokens // self.page_size
            self.allocator.keep_after_all(insertion.own, insertion.step)
            request.pages[first : first + len(insertion.own)] = insertion.own
            self.out_of_date(request, first)

    def shrink(self, request: Request, length: int) -> None:
        """Takes the room for all but the first `length` tokens back from a request that no launched
        step names."""
        request.length = length
        if self.is_lost(request):
            return
        needed = pages_for(length, self.page_size)
        self.allocator.free(request.pages[needed:])
        del request.pages[needed:]
        self.out_of_date(request, needed)

    def pin(self, request: Request, now: float) -> None:
        """Keeps what a request asks to be kept of its prompt, which has been computed: as much of
        it as is in the cache, and as pins may keep."""
        record, pins, size = request.scheduling, self.cache.pins, self.page_size
        most = min(record.tree_tokens, pins.most_tokens)
        for wish in request.pins:
            tokens = min(wish.tokens, most) // size * size
            node = self.cache.above(record.node, tokens)
            if node is not None:
                key = (request.namespace, wish.key) if wish.key else NO_KEY
                pins.keep(node, key, now + wish.ttl_s)
                request.pinned_tokens = max(request.pinned_tokens, tokens)

    def drop(self, request: Request, first: int, last: int, readers: Iterable[Request]) -> None:
        """Takes what is cached of a request's tokens from `first` to `last` out of the cache, with
        all that hangs below, but for what one of the readers has there."""
        place = Place()
        self.cache.tree.seek(place, request.namespace, request.scheduling.key, last)
        end = node = self.cache.end_at(place)
        if self.states is not None:
            # That a request has had tokens from there says nothing of the states: it may have
            # computed its own.
            self.states.give_up_all(request.scheduling.saved)
            self.states.give_up_path(end, first)
        kept = _paths(readers)
        while node is not None and node not in kept:
            node = node.parent
        first = max(first, node.end if node is not None else 0)
        if end is not None and first < end.end:
            self.cache.drop(end, first)

    def is_lost(self, request: Request) -> bool:
        """Whether KV that a request reads is out of the cache, having been dropped."""
        node = request.scheduling.node
        return node is not None and node.dead

    def release(self, request: Request, keep_tokens: int) -> None:
        """Takes everything from a request that no launched step names; the KV of its first
        `keep_tokens` tokens stays in the cache."""
        if request.row < 0:
            return
        record = request.scheduling
        if not self.is_lost(request):
            self.insert(request, min(keep_tokens, request.length))
            if self.tier is not None and record.verified:
                self.tier.write_behind.mark_verified(request)
        if self.states is not None:
            self.states.release(request)
        self.cache.unlock(record.node)
        self.allocator.free(request.pages[record.tree_tokens // self.page_size :])
        self.free_rows.append(request.row)
        request.row = -1
        request.pages = array("i")
        record.node = None
        record.tree_tokens = 0
        record.synced_pages = 0

    def private_tokens(self, request: Request) -> int:
        return len(request.pages) * self.page_size - request.scheduling.tree_tokens

    def page_indices(self, first: int, last: int) -> array[int]:
        """The ints from `first` to `last`. Counted out one by one they would cost a millisecond per
        30,000, where a long prefix is cached."""
        return self._indices[first:last]


def _saved_states(config: SchedulerConfig) -> SavedStates:
    """Their slots are behind those of the rows."""
    return SavedStates(
        config.max_running_requests + 1,
        config.state_slots,
        interval=whole_pages(config.state_interval, config.page_size),
        page_size=config.page_size,
    )


def match_limit(request: Request) -> int:
    """Most tokens of a request that may come from the cache."""
    record = request.scheduling
    if record.isolated:
        return 0
    if request.sampling.prompt_logprobs is not None and not request.output_ids:
        return 0
    return len(record.key) // TOKEN_BYTES - 1


def _paths(requests: Iterable[Request]) -> set[Node]:
    """Every node that holds a part of what one of these requests has in the cache."""
    found: set[Node] = set()
    for request in requests:
        node = request.scheduling.node
        while node is not None and node not in found:
            found.add(node)
            node = node.parent
    return found
