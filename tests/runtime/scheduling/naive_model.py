"""What must hold of a scheduler after every step, recounted from scratch by slow, plain code.

Written from the rules, not from the scheduler: it looks at the tokens of requests, at the launched
batches, and at the raw contents of free lists and tree, and trusts no counter and no pointer that
the scheduler keeps for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from runtime.request import FinishReason, Request
from runtime.runner import StepOutput
from runtime.scheduling.radix_cache import RadixCache
from runtime.scheduling.radix_tree import Node
from runtime.scheduling.schedule_batch import ScheduleBatch
from runtime.scheduling.scheduler import Scheduler
from tests.runtime.scheduling.scheduler_harness import SPOILT, FakeDevice


@dataclass
class Life:
    """A request as seen from outside."""

    request: Request
    order: int
    launched: int = 0  # tokens sampled by launched steps since the last retraction
    decoding: bool = False  # a launched step has completed its prompt
    cut: bool = False  # a launched step has computed part of its prompt, none the end of it
    retractions: int = 0
    ending: bool = False
    ended: bool = False
    outputs_before: int = 0  # tokens that it had when it last started
    # What it had read of others when it gave no number, until it is known whose fault that was.
    suspects: dict[int, Any] | None = None
    starts_anew: bool = False  # as soon as no launched step names it

    @property
    def progress(self) -> tuple[int, bool, bool]:
        """What a step that is taken back changes."""
        return self.launched, self.decoding, self.cut

    @progress.setter
    def progress(self, before: tuple[int, bool, bool]) -> None:
        self.launched, self.decoding, self.cut = before


@dataclass
class Launched:
    """A step in flight: the pages it names, those it writes to, and everybody's progress before."""

    batch: ScheduleBatch
    pages: set[int]
    written: set[int]
    before: dict[str, tuple[int, bool, bool]]


Head = tuple[str, tuple[int, ...]]  # a cached prefix: namespace, tokens in whole pages


@dataclass
class Kept:
    """A pinned prefix. Args: key: of each but "" there is one in a namespace."""

    prefix: Head
    key: str
    until: float


@dataclass
class NaiveModel:
    """Follows every call and checks every rule.

    Args:
        scheduler: what is checked.
        device: what it schedules for: where KV is truly written.
        mixing: mixed steps are on.
        cache: prefixes are reused.
    """

    scheduler: Scheduler
    device: FakeDevice
    mixing: bool
    cache: bool
    lives: dict[str, Life] = field(default_factory=dict)
    launched: list[Launched] = field(default_factory=list)
    owed: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # rows to be tried again
    acquitted: int = 0  # requests that turned out to have read what was no number
    preemptions: int = 0
    arrivals: int = 0
    kept: list[Kept] = field(default_factory=list)  # the one that was asked for last is the last
    before: dict[Head, int] = field(default_factory=dict)  # cached before this pass, with pages
    read_before: set[int] = field(default_factory=set)  # pages of these that somebody read then
    load_prefixes: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    # Calls

    def added(self, request: Request) -> None:
        self.lives[request.request_id] = Life(request, self.arrivals)
        self.arrivals += 1

    def marked(self, request_id: str) -> None:
        """An abort or a text finish was accepted."""
        self.lives[request_id].ending = True

    def planned(self, batch: ScheduleBatch | None, admitted_before: set[str]) -> None:
        """A pass is over.

        Args:
            admitted_before: ids of requests that held a table row before the pass.
        """
        if self._check_retractions(admitted_before):
            assert batch is not None, "preempted for nobody"
            threshold = self.scheduler.config.priority_preemption_threshold
            started = [r for r in batch.requests if r.request_id not in admitted_before]
            lowest = min(self.lives[name].request.priority for name in admitted_before)
            gap = max([r.priority for r in started], default=lowest) - lowest
            assert gap > threshold, "preempted for somebody who does not start"
        self._look_at_ends()
        self._look_at_loads()
        self._check_evictions()
        if batch is None:
            return
        if batch.retry:
            self._check_retry(batch)
        else:
            assert not any(self._goes_on(name) for name in self.owed), "planned before a retry"
            self.owed.clear()
            self._check_order(batch)
        before = {name: life.progress for name, life in self.lives.items()}
        self._follow(batch)
        pages = {page for request in batch.requests for page in request.pages}
        self.launched.append(Launched(batch, pages, self._pages_written(batch), before))

    def _look_at_loads(self) -> None:
        """Notes behind which tokens each load of this pass goes on."""
        loads = self.device.tier.loads
        places = {
            frame: (namespace, tokens[: len(tokens) - (len(frames) - at) * self.page_size])
            for (namespace, tokens), (_, frames) in self._tier_tree().items()
            for at, frame in enumerate(frames)
        }
        for load_id, load in loads.items():
            if load_id not in self.load_prefixes:
                self.load_prefixes[load_id] = places[load.frames[0]]
        for load_id in set(self.load_prefixes) - set(loads):
            del self.load_prefixes[load_id]

    def _pages_written(self, batch: ScheduleBatch) -> set[int]:
        written: set[int] = set()
        rows = zip(batch.requests, batch.prefix_lens, batch.extend_lens, strict=True)
        for request, start, new in rows:
            first, last = start // self.page_size, (start + new - 1) // self.page_size
            written.update(request.pages[first : last + 1])
        return written

    def commit(self, commit: Callable[[], StepOutput], now: float = 0.0) -> None:
        """Has the oldest step in flight committed, and looks at who must start anew for it.

        Args: commit: does it, and returns what the step gave.
        """
        flight = self.launched.pop(0)
        batch = flight.batch
        prompts = [self.lives[batch.requests[b].request_id] for b in batch.sampled]
        prompts = prompts[: sum(b < batch.num_prefill for b in batch.sampled)]
        cached = self._cached_pages()
        borrowed = [self.device.written_by_others(batch, b) for b in batch.sampled]
        due = [not (life.ended or life.ending or life.starts_anew) for life in prompts]
        heads = self._heads() if self.kept else {}
        failed = commit().failed
        self._shorten_kept(heads)
        self._keep_prompts(batch, failed, now)
        for request in batch.requests:
            self.owed.pop(request.request_id, None)
        self._look_at_ends()
        for i, life in enumerate(prompts):
            if due[i]:
                self._judge(life, borrowed[i], gave_none=i in failed)
        self._look_for_losses(cached - self._cached_pages())

    def _judge(self, life: Life, borrowed: dict[int, Any], *, gave_none: bool) -> None:
        """A prompt is complete. Args: borrowed: what it has read that others have computed."""
        assert life.suspects is None or not borrowed, "it is not alone"
        if not gave_none:
            if life.suspects is not None:
                self.acquitted += self.device.condemn(life.suspects)
                life.suspects = None
        elif life.ended:
            assert not borrowed, "it ended by what others had computed"
        else:
            assert life.suspects is None, "it is tried alone a second time"
            life.suspects = borrowed
            self._starts_anew(life)

    def _look_for_losses(self, lost: set[int]) -> None:
        """Who holds what has left the cache starts anew. It has had no tokens from it, but for one
        that may be older than the last of what it holds."""
        for life in self.lives.values():
            request = life.request
            if request.retractions > life.retractions or lost.intersection(request.pages):
                tokens = len(request.output_ids) - life.outputs_before
                assert tokens < 2 or life.ended, "who has had tokens must start anew"
                self._starts_anew(life)
        self.owed = {name: row for name, row in self.owed.items() if self._goes_on(name)}

    def _starts_anew(self, life: Life) -> None:
        life.starts_anew = not life.ended
        life.progress = (0, False, False)
        for flight in self.launched:  # also if this one fails
            flight.before[life.request.request_id] = life.progress

    def _cached_pages(self) -> set[int]:
        return {page for _, pages in self._tree().values() for page in pages}

    def failed(self) -> None:
        """Every step in flight is taken back, and the oldest is to be tried again."""
        self._shorten_kept(self._heads())
        flight = self.launched[0]
        for name, life in self.lives.items():
            life.progress = flight.before.get(name, (0, False, False))
        requests = flight.batch.requests
        rows = rows_of(flight.batch)
        if len(requests) > 1:
            self.owed.update(zip([r.request_id for r in requests], rows, strict=True))
        else:
            self.owed.pop(requests[0].request_id, None)
        self.launched.clear()
        self._look_at_ends()
        self.owed = {name: row for name, row in self.owed.items() if self._goes_on(name)}

    def _look_at_ends(self) -> None:
        for life in self.lives.values():
            life.ended = life.request.finish is not None

    def _goes_on(self, name: str) -> bool:
        return not self.lives[name].ended and self.lives[name].request.row >= 0

    def _check_retry(self, batch: ScheduleBatch) -> None:
        """Rows of a failed step come again as they were, and nothing else is in flight."""
        assert not self.launched
        for request, row in zip(batch.requests, rows_of(batch), strict=True):
            assert self.owed[request.request_id] == row

    def _check_retractions(self, admitted_before: set[str]) -> bool:
        """Returns: whether somebody was preempted."""
        preempted = self.scheduler.counters.preemptions > self.preemptions
        self.preemptions = self.scheduler.counters.preemptions
        oldest = min((self.lives[i].order for i in admitted_before), default=-1)
        for life in self.lives.values():
            if life.request.retractions == life.retractions:
                continue
            assert life.request.retractions == life.retractions + 1
            life.retractions += 1
            named = any(life.request in flight.batch.requests for flight in self.launched)
            assert not named, "retracted while a launched step names its slots"
            may = preempted or life.starts_anew or life.order != oldest
            assert may, "the oldest admitted request was retracted"
            life.progress, life.starts_anew = (0, False, False), False
        return preempted

    def _check_order(self, batch: ScheduleBatch) -> None:
        """Without reuse, priorities and arrival alone decide who is admitted under fcfs; but a
        prompt that is computed at once may go ahead while a longer one is being cut."""
        if self.scheduler.config.schedule_policy != "fcfs" or self.cache:
            return
        started = [self.lives[r.request_id] for r in batch.requests[: batch.num_prefill]]
        started = [life for life in started if not life.cut]
        waiting = [
            life
            for life in self.lives.values()
            if life.request.row < 0 and not life.request.finish and not life.request.grammar
        ]
        ahead = self._ahead(batch, started, waiting)
        for new in started:
            for other in waiting if new not in ahead else ():
                older = (-other.request.priority, other.order) < (-new.request.priority, new.order)
                assert not older, f"{new.request.request_id} overtook {other.request.request_id}"

    def _ahead(self, batch: ScheduleBatch, started: list[Life], waiting: list[Life]) -> list[Life]:
        """Who of those that a step starts may have gone ahead of others."""
        cut = [life.request.priority for life in self.lives.values() if life.cut and not life.ended]
        if not self.scheduler.config.prefill_share or not cut:
            return []
        least = max([*cut, *(life.request.priority for life in waiting)])
        whole = [batch.requests[b] for b in batch.sampled if b < batch.num_prefill]
        return [
            life for life in started if life.request in whole and life.request.priority >= least
        ]

    def _follow(self, batch: ScheduleBatch) -> None:
        carried = {request.request_id for request in batch.requests[batch.num_prefill :]}
        for life in self.lives.values():
            request = life.request
            due = life.decoding and life.launched < request.max_new_tokens and not life.ended
            decode_rows_ride = not batch.retry and (self.mixing or not batch.num_prefill)
            if due and decode_rows_ride:
                assert request.request_id in carried, "a running request got no decode row"
            if request.request_id in carried:
                assert due, "a decode row for a request that is not running"
                life.launched += 1
        for b, request in enumerate(batch.requests[: batch.num_prefill]):
            life = self.lives[request.request_id]
            total = len(request.input_ids) + len(request.output_ids)
            end = batch.prefix_lens[b] + batch.extend_lens[b]
            assert batch.extend_lens[b] > 0
            assert end <= total, "prefills past the end of its tokens"
            assert not life.decoding
            if end < total:
                assert b not in batch.sampled
                self._check_cut(life, end)
                self._note_start(life)
                life.cut = True
            else:
                assert b in batch.sampled
                self._note_start(life)
                life.cut, life.decoding = False, True
                life.launched = len(request.output_ids) + 1
        cut = [life for life in self.lives.values() if life.cut and not life.ended]
        assert len(cut) <= 1, "more than one prompt is cut"

    def _note_start(self, life: Life) -> None:
        assert not life.starts_anew, "it goes on over what is no number"
        if not life.cut:
            life.outputs_before = len(life.request.output_ids)

    def _check_cut(self, life: Life, end: int) -> None:
        """A prompt is cut at the end of a page, later also inside one; but never where cuts are
        aligned and the alignment says otherwise."""
        align = self.scheduler.config.truncation_align_size
        if align or not life.cut:
            assert end % (align or self.page_size) == 0, "a prompt is cut where it must not be"

    # Pins

    def planning(self, now: float) -> None:
        """A pass begins, with which pins end whose time is over."""
        self.kept = [one for one in self.kept if one.until > now]
        if self.kept:
            self.before = self._heads()
            self.read_before = self._read(self.before)

    def pins_bounded(self) -> None:
        """The bound of all pins may be a new one: those that nobody has asked for longest go."""
        most = int(self.scheduler.config.pin_share * self.scheduler.config.usable_tokens)
        while len(self._pinned()) * self.page_size > most:
            del self.kept[0]

    def _keep_prompts(self, batch: ScheduleBatch, failed: Container[int], now: float) -> None:
        """Prompts that were completed are kept as they ask: those that are still wanted, that were
        not dropped with a row that gave no number, and that do not start anew."""
        size, config = self.page_size, self.scheduler.config
        most = int(config.pin_share * config.usable_tokens)
        heads = self._heads() if any(request.pins for request in batch.requests) else {}
        for index, b in enumerate(batch.sampled):
            life = self.lives[batch.requests[b].request_id]
            request = life.request
            end = batch.prefix_lens[b] + batch.extend_lens[b]
            gone = life.ended or life.ending or life.starts_anew
            if b >= batch.num_prefill or index in failed or gone:
                continue
            tokens = (*request.input_ids, *request.output_ids)[:end]
            whole = request.namespace, tokens[: end // size * size]
            for wish in request.pins if whole in heads else ():
                prefix = whole[0], tokens[: min(wish.tokens, most, end) // size * size]
                if prefix[1]:
                    self._keep(Kept(prefix, wish.key, now + wish.ttl_s))
                    self.pins_bounded()

    def _keep(self, new: Kept) -> None:
        for one in [*self.kept]:
            same = (one.key, one.prefix) == (new.key, new.prefix)
            if same or (new.key and (one.key, one.prefix[0]) == (new.key, new.prefix[0])):
                self.kept.remove(one)
                new.until = max(new.until, one.until) if same else new.until
        self.kept.append(new)

    def _shorten_kept(self, before: dict[Head, int]) -> None:
        """What was dropped is not kept any more, but what stands before it is.

        Args: before: what was cached, with pages; in the place of what was dropped there may be
            others.
        """
        heads = dict(self._heads().items() & before.items()) if self.kept else {}
        shortened: dict[tuple[str, Head], Kept] = {}
        for one in self.kept:
            name, tokens = one.prefix
            while tokens and (name, tokens) not in heads:
                tokens = tokens[: -self.page_size]
            if tokens:
                other = shortened.pop((one.key, (name, tokens)), one)
                kept = Kept((name, tokens), one.key, max(one.until, other.until))
                shortened[one.key, kept.prefix] = kept
        self.kept = list(shortened.values())

    def _check_evictions(self) -> None:
        """What is pinned has lost nothing in this pass, unless nothing else could go."""
        if not self.kept:
            return  # nor are there any of the scheduler's, as the next recount sees
        pinned, heads, actual = self._pinned(), self._heads(), self._pins()
        if actual == self.kept and pinned <= heads.keys():
            return
        # Who gave way in this pass may have done so after pins had gone.
        read = self.read_before | self._read(heads)
        others = heads.keys() & self.before.keys() - pinned
        assert all(heads[head] in read for head in others), "a pin went before what is not pinned"
        for pin in actual:
            longer = [one for one in self.kept if pin.prefix in _beginnings(one.prefix)]
            assert any((pin.key, pin.until) == (one.key, one.until) for one in longer)
        self.kept = actual

    def _read(self, heads: dict[Head, int]) -> set[int]:
        """Pages that cannot go: requests have them, or what is to be loaded will hang there."""
        read = {page for request in self._holders() for page in request.pages}
        for name, tokens in self.load_prefixes.values():
            ends = range(self.page_size, len(tokens) + 1, self.page_size)
            read.update(heads.get((name, tokens[:end]), 0) for end in ends)
        return read

    def _pins(self) -> list[Kept]:
        """The scheduler's."""
        pins = list(self.scheduler._memory.cache.pins)
        tree = self._tree() if pins else {}
        prefixes = {id(node): prefix for prefix, (node, _) in tree.items()}
        return [Kept(prefixes[id(pin.node)], pin.key[1], pin.until_s) for pin in pins]

    def _pinned(self) -> set[Head]:
        """Every cached page that is kept, by its prefix."""
        return {
            (name, tokens[:end])
            for name, tokens in (one.prefix for one in self.kept)
            for end in range(self.page_size, len(tokens) + 1, self.page_size)
        }

    def _heads(self) -> dict[Head, int]:
        """Every cached page by its prefix, with its number."""
        size = self.page_size
        return {
            (name, tokens[: len(tokens) - at * size]): page
            for (name, tokens), (_, pages) in self._tree().items()
            for at, page in enumerate(reversed(pages))
        }

    def _check_pins(self) -> None:
        pins = self.scheduler._memory.cache.pins
        if not (self.kept or pins.tokens or len(pins)):
            return
        assert self._pins() == self.kept
        pinned = self.scheduler.statistics().pinned_tokens
        config = self.scheduler.config
        assert pinned == len(self._pinned()) * self.page_size
        assert pinned <= config.pin_share * config.usable_tokens

    # Recount

    def check(self) -> None:
        """Every invariant, from scratch."""
        allocator = self.scheduler._memory.allocator
        free = [page for part in allocator.free_slices(1000) for page in part]
        deferred = allocator.deferred()
        free_rows = self.scheduler._memory.free_rows
        tree = self._tree()
        self._check_pages(free, deferred, tree)
        self._check_written(tree)
        self._check_tier()
        self._check_locks(tree)
        self._check_rows(free_rows)
        self._check_pins()
        for flight in self.launched:
            assert flight.pages.isdisjoint(free), "a launched step names a free page"

    def _tree(self) -> dict[tuple[str, tuple[int, ...]], tuple[Any, list[int]]]:
        """Every node by its whole prefix, walked from the roots, with its pages."""
        return self._walk(self.scheduler._memory.cache)

    def _tier_tree(self) -> dict[tuple[str, tuple[int, ...]], tuple[Any, list[int]]]:
        """The same of the tier below the pool, with its frames."""
        tier = self.scheduler._memory.tier
        return {} if tier is None else self._walk(tier.cache)

    def _walk(self, cache: RadixCache) -> dict[tuple[str, tuple[int, ...]], tuple[Any, list[int]]]:
        found: dict[tuple[str, tuple[int, ...]], tuple[Any, list[int]]] = {}
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

    def _check_pages(self, free: list[int], deferred: list[int], tree: dict[Any, Any]) -> None:
        filling = [page for load in self.device.tier.loads.values() for page in load.pages]
        owned: Counter[int] = Counter([0, *free, *deferred, *filling])
        cached = [page for _, pages in tree.values() for page in pages]
        owned.update(cached)
        private = 0
        for request in self._holders():
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

    def _check_tier(self) -> None:
        """Whatever of the tier could be loaded holds the KV of just its tokens; and what is being
        read from it stays there."""
        size, tier = self.page_size, self.device.tier
        tree = self._tier_tree()
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
            for request in self._holders():
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
        held = [request.row for request in self._holders()]
        rows = self.scheduler.config.max_running_requests
        assert sorted(held + free_rows) == list(range(1, rows + 1))
        for flight in self.launched:
            for request, row in zip(flight.batch.requests, flight.batch.rows, strict=True):
                assert request.row == row, "a launched row was given away"

    def _holders(self) -> list[Request]:
        return [life.request for life in self.lives.values() if life.request.row >= 0]

    @property
    def page_size(self) -> int:
        return self.scheduler.config.page_size


def _beginnings(head: Head) -> set[Head]:
    return {(head[0], head[1][:end]) for end in range(len(head[1]) + 1)}


def rows_of(batch: ScheduleBatch) -> list[tuple[Any, ...]]:
    """All that a row of a step is but its page numbers."""
    sampled = {
        b: (batch.sample_positions[i], batch.output_counts[i]) for i, b in enumerate(batch.sampled)
    }
    ends = list(accumulate(batch.extend_lens[: batch.num_prefill], initial=0))
    return [
        (
            batch.rows[b],
            batch.prefix_lens[b],
            batch.extend_lens[b],
            list(batch.input_ids[ends[b] : ends[b + 1]]) if b < batch.num_prefill else None,
            sampled.get(b),
        )
        for b in range(len(batch.requests))
    ]


def expected_tokens(request: Request, tokens: list[int], eos: frozenset[int]) -> tuple[int, str]:
    """(how many of the tokens that the model would sample are the request's, why it ends)."""
    stops = set(request.sampling.stop_token_ids)
    if not request.sampling.ignore_eos:
        stops |= eos
    for count, token in enumerate(tokens[: request.max_new_tokens], 1):
        if token in stops and count > request.sampling.min_tokens:
            return count, FinishReason.STOP.value
    return request.max_new_tokens, FinishReason.LENGTH.value
