"""The radix cache against a model of single pages: no tree, no counters, everything looked up anew.

The model knows of every cached prefix, in whole pages, which page ends it, who uses it, and when it
was used. From that alone follow every match, every page of every prefix, what may be evicted, and
which page goes next under every policy.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from dataclasses import dataclass, field

import pytest

from runtime.scheduling.page_allocator import PageAllocator
from runtime.scheduling.pins import NO_KEY
from runtime.scheduling.radix_cache import RadixCache
from runtime.scheduling.radix_tree import Node, Place
from tests.values import present

Prefix = tuple[str, tuple[int, ...]]  # namespace, tokens in whole pages
MOST_PINNED = 40  # pages


@dataclass(eq=False)
class Page:
    number: int
    inserted: int
    used: int = 0
    admissions: int = 0
    readers: int = 0
    dropped: bool = False


@dataclass(eq=False)
class Reader:
    """A request: its prefix in the cache."""

    prefix: Prefix
    node: Node | None
    pages: list[Page]

    @property
    def lost(self) -> bool:
        return any(page.dropped for page in self.pages)


@dataclass(eq=False)
class Growth:
    """What a reader put into the cache: where its prefix ended before, what it then found there,
    in tokens, and its own pages."""

    reader: Reader
    before: int
    known: int
    pages: list[int]


@dataclass(eq=False)
class Kept:
    """A pinned prefix. Args: key: of each but "" there is one."""

    prefix: Prefix
    key: str
    until: int


@dataclass
class Model:
    page_size: int
    policy: str
    pages: dict[Prefix, Page] = field(default_factory=dict)
    now: int = 0
    kept: list[Kept] = field(default_factory=list)  # the one that was asked for last is the last

    def heads(self, prefix: Prefix) -> list[Prefix]:
        """All whole-page beginnings of a prefix, the shortest first."""
        name, tokens = prefix
        return [(name, tokens[:n]) for n in range(self.page_size, len(tokens) + 1, self.page_size)]

    def longest(self, name: str, tokens: list[int], limit: int) -> Prefix:
        best: Prefix = (name, ())
        for head in self.heads((name, tuple(tokens[: max(limit, 0)]))):
            if head not in self.pages:
                break
            best = head
        return best

    def path(self, prefix: Prefix) -> list[Page]:
        return [self.pages[head] for head in self.heads(prefix)]

    def use(self, prefix: Prefix) -> None:
        self.now += 1
        for page in self.path(prefix):
            page.used = self.now

    def extensions(self, prefix: Prefix) -> list[Prefix]:
        name, tokens = prefix
        longer = len(tokens) + 1
        return [
            p
            for p in self.pages
            if p[0] == name and len(p[1]) >= longer and p[1][: longer - 1] == tokens
        ]

    def next_to_go(self) -> Prefix | None:
        inner = {(name, tokens[: -self.page_size]) for name, tokens in self.pages}
        free = [p for p, page in self.pages.items() if p not in inner and not page.readers]
        pinned = self.pinned()
        return min(free, key=lambda p: (p in pinned, *self._worth(self.pages[p])), default=None)

    def _worth(self, page: Page) -> tuple[int, ...]:
        if self.policy == "lfu":
            return page.admissions, page.used
        return (page.used,) if self.policy == "lru" else (page.inserted,)

    def drop(self, prefix: Prefix, position: int) -> None:
        """What follows the first `position` tokens of a prefix goes, with all that follows it."""
        name, tokens = prefix
        first = (name, tokens[: position + self.page_size])
        for gone in [first, *self.extensions(first)]:
            self.pages.pop(gone).dropped = True
        self.shorten_kept()

    def pinned(self) -> set[Prefix]:
        return {head for one in self.kept for head in self.heads(one.prefix)}

    def keep(self, prefix: Prefix, key: str, until: int, most_pages: int) -> None:
        before = [one for one in self.kept if one.key == key and (key or one.prefix == prefix)]
        same = [one.until for one in before if one.prefix == prefix]
        self.kept = [one for one in self.kept if one not in before]
        self.kept.append(Kept(prefix, key, max([until, *same])))
        while len(self.pinned()) > most_pages:
            del self.kept[0]

    def shorten_kept(self) -> None:
        """Of what is gone the part that is left is kept; what has become one is one."""
        for one in self.kept:
            name, tokens = one.prefix
            while tokens and (name, tokens) not in self.pages:
                tokens = tokens[: -self.page_size]
            one.prefix = (name, tokens)
        latest: dict[tuple[str, Prefix], Kept] = {}
        for one in self.kept:
            if one.prefix[1]:
                other = latest.pop((one.key, one.prefix), one)
                one.until = max(one.until, other.until)
                latest[one.key, one.prefix] = one
        self.kept = list(latest.values())


class Life:
    """Cache and model are told the same."""

    def __init__(self, seed: int, page_size: int, policy: str, node_tokens: int) -> None:
        self.rng = random.Random(seed)
        self.allocator = PageAllocator(151 * page_size, page_size)
        self.cache = RadixCache(self.allocator, policy, node_tokens, MOST_PINNED * page_size)
        self.model = Model(page_size, policy)
        self.size = page_size
        self.readers: list[Reader] = []
        self.growths: list[Growth] = []  # newest last
        self.waiting = [self.prompt() for _ in range(8)]
        self.counts: Counter[str] = Counter()
        self.time = 0

    def prompt(self) -> tuple[str, list[int], Place]:
        """New, or one that goes on where a cached prefix ends, be it a whole node or not."""
        name = self.rng.choice(["", "", "salt"])
        tokens = self.tokens()
        if self.model.pages and self.rng.random() < 0.5:
            name, cached = self.rng.choice(list(self.model.pages))
            tokens = [*cached, *(tokens if self.rng.random() < 0.5 else [9])]
        return name, tokens, Place()

    def tokens(self) -> list[int]:
        """Few different tokens, so that prompts share beginnings; some differ inside a page."""
        pages = [[self.rng.randint(0, 1)] * self.size for _ in range(self.rng.randint(1, 14))]
        flat = [token for page in pages for token in page]
        if self.rng.random() < 0.3:
            flat[self.rng.randrange(len(flat))] = 7
        return flat[: len(flat) - self.rng.randrange(self.size)]

    def look(self) -> None:
        name, tokens, place = self.rng.choice(self.waiting)
        limit = self.rng.choice([len(tokens), len(tokens) - 1, len(tokens) // 2])
        expected = self.model.longest(name, tokens, limit)
        match = self.cache.match(name, array("i", tokens).tobytes(), limit, place)
        assert match.tokens == len(expected[1])
        if match.tokens:
            self.model.use(expected)

    def admit(self) -> None:
        index = self.rng.randrange(len(self.waiting))
        name, tokens, place = self.waiting[index]
        self.waiting[index] = self.prompt()
        match = self.cache.match(name, array("i", tokens).tobytes(), len(tokens) - 1, place)
        prefix = self.model.longest(name, tokens, len(tokens) - 1)
        assert match.tokens == len(prefix[1])
        self.cache.lock(match.node)
        self.cache.count_use(match.node)
        if match.tokens:
            self.model.use(prefix)
        reader = Reader(prefix, match.node, self.model.path(prefix))
        for page in reader.pages:
            page.readers += 1
            page.admissions += 1
        self.readers.append(reader)

    def grow(self) -> None:
        """A reader puts what its step computes into the cache, be it there already or not."""
        alive = [reader for reader in self.readers if not reader.lost]
        if not alive:
            return
        reader = self.rng.choice(alive)
        count = self.rng.randint(1, 6)
        if count > self.allocator.free_pages:
            return
        name, before = reader.prefix
        new = [self.rng.choice([0, 1, 1, 3]) for _ in range(count) for _ in range(self.size)]
        if self.rng.random() < 0.7:
            new = [page for token in new[:: self.size] for page in [token] * self.size]
        reader.prefix = (name, (*before, *new))
        mine = list(self.allocator.allocate_pages(count))
        missing = [head for head in self.model.heads(reader.prefix) if head not in self.model.pages]
        known, node = self.cache.insert(
            name, array("i", new).tobytes(), array("i", mine), reader.node
        )
        self.cache.move_lock(reader.node, node)
        reader.node = node
        assert known == (count - len(missing)) * self.size
        self.model.now += 1
        for head, number in zip(missing, mine[count - len(missing) :], strict=True):
            self.model.pages[head] = Page(number, self.model.now)
        self.allocator.free(mine[: count - len(missing)])
        self.model.use(reader.prefix)
        for page in self.model.path(reader.prefix)[len(reader.pages) :]:
            page.readers += 1
            page.admissions += 1
            reader.pages.append(page)
        before_tokens = len(before)
        growth = Growth(reader, before_tokens, before_tokens + known, mine[known // self.size :])
        self.growths.append(growth)

    def release(self) -> None:
        if self.readers:
            reader = self.rng.choice(self.readers)
            self.readers.remove(reader)
            self.growths = [growth for growth in self.growths if growth.reader is not reader]
            self.cache.unlock(reader.node)
            for page in reader.pages:
                page.readers -= 1

    def take_back(self) -> None:
        """The newest insertions are undone, as long as nobody has started from them."""
        while self.growths and self.rng.random() < 0.7:
            growth = self.growths.pop()
            reader, size = growth.reader, self.size
            added = reader.pages[growth.known // size :]
            if reader.lost or any(page.readers > 1 for page in added):
                return
            above = self.cache.above(reader.node, growth.before)
            self.cache.move_lock(reader.node, above)
            if added:
                self.cache.take_back(present(reader.node), growth.known)
                self.model.drop(reader.prefix, growth.known)
            self.allocator.free(growth.pages)
            for page in reader.pages[growth.before // size :]:
                page.readers -= 1
                page.admissions -= 1
            del reader.pages[growth.before // size :]
            reader.prefix = (reader.prefix[0], reader.prefix[1][: growth.before])
            reader.node = above
            self.counts["taken back"] += len(added)

    def drop(self) -> None:
        """What a reader has in the cache is wrong from somewhere on."""
        alive = [reader for reader in self.readers if reader.pages and not reader.lost]
        if alive and self.rng.random() < 0.2:
            reader = self.rng.choice(alive)
            position = self.rng.randrange(len(reader.pages)) * self.size
            self.cache.drop(present(reader.node), position)
            self.model.drop(reader.prefix, position)
            self.counts["dropped"] += len(reader.pages) - position // self.size

    def evict(self) -> None:
        wanted = self.rng.choice([1, 2, 3, 5, 20])
        freed = self.cache.evict(wanted)
        for count in range(wanted):
            gone = self.model.next_to_go()
            if gone is None:
                assert freed == count
                return
            self.counts["pinned evicted"] += gone in self.model.pinned()
            del self.model.pages[gone]
            self.model.shorten_kept()
        assert freed == wanted
        self.counts["evicted"] += freed

    def pin(self) -> None:
        """A part of what a reader has is to be kept."""
        alive = [reader for reader in self.readers if not reader.lost]
        if not alive:
            return
        reader = self.rng.choice(alive)
        name, tokens = reader.prefix
        most = min(len(tokens) // self.size, MOST_PINNED)
        if not most:
            return
        count = self.rng.choice([most, self.rng.randint(1, most)]) * self.size
        until = self.time + self.rng.choice([1, 8, 100])
        key = self.rng.choice(["", "", "a", "b", "c"])
        node = present(self.cache.above(reader.node, count))
        self.cache.pins.keep(node, (name, key) if key else NO_KEY, until)
        own = f"{name}/{key}" if key else ""
        self.model.keep((name, tokens[:count]), own, until, MOST_PINNED)
        self.counts["pinned"] += 1

    def pass_time(self) -> None:
        self.time += 1
        self.cache.pins.expire(self.time)
        before = len(self.model.kept)
        self.model.kept = [one for one in self.model.kept if one.until > self.time]
        self.counts["expired"] += before - len(self.model.kept)

    def check(self) -> None:
        found = self._walk()
        expected = {prefix: page.number for prefix, page in self.model.pages.items()}
        assert found == expected, "other prefixes, or other pages, than the model's"
        locked = sum(page.readers > 0 for page in self.model.pages.values())
        kept = {p.number for r in self.readers for p in r.pages if p.dropped}
        assert self.cache.evictable_tokens == (len(expected) - locked) * self.size
        assert self.cache.protected_tokens == (locked + len(kept)) * self.size
        self.check_pins()
        free = [page for part in self.allocator.free_slices(50) for page in part]
        assert sorted([*free, *kept, *expected.values()]) == list(range(1, 151))
        for reader in self.readers:
            pages = self.cache.pages(reader.node, 0, len(reader.prefix[1]))
            assert list(pages) == [page.number for page in reader.pages]
            assert reader.lost == (reader.node is not None and reader.node.dead)
        for name, tokens, place in self.waiting if self.rng.random() < 0.1 else ():
            self.cache.tree.seek(place, name, array("i", tokens).tobytes(), len(tokens))
            assert place.tokens == len(self.model.longest(name, tokens, len(tokens))[1])

    def check_pins(self) -> None:
        pins = [(pin.node.end // self.size, pin.until_s) for pin in self.cache.pins]
        assert pins == [(len(one.prefix[1]) // self.size, one.until) for one in self.model.kept]
        for pin, one in zip(self.cache.pins, self.model.kept, strict=True):
            numbers = [page.number for page in self.model.path(one.prefix)]
            assert list(self.cache.pages(pin.node, 0, pin.node.end)) == numbers
        assert self.cache.pins.tokens == len(self.model.pinned()) * self.size
        for node in self.cache.tree.nodes():
            ends = sum(pin.node is node for pin in self.cache.pins)
            assert node.pins == ends + sum(child.pins > 0 for child in node.children.values())

    def _walk(self) -> dict[Prefix, int]:
        found: dict[Prefix, int] = {}
        stack: list[tuple[str, tuple[int, ...], Node]] = [
            (name, (), root) for name, root in self.cache.tree.roots.items()
        ]
        while stack:
            name, before, node = stack.pop()
            tokens = (*before, *memoryview(bytes(node.key)).cast("i"))
            for index, page in enumerate(node.pages, 1):
                found[name, tokens[: len(before) + index * self.size]] = page
            stack.extend((name, tokens, child) for child in node.children.values())
        return found


@pytest.mark.parametrize("node_pages", [3, 1000], ids=["small nodes", "large nodes"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
@pytest.mark.parametrize("pins", [False, True], ids=["", "pins"])
@pytest.mark.sampled(4)
def test_random_lives_agree_with_the_model(
    policy: str, page_size: int, node_pages: int, pins: bool
) -> None:
    life = Life(page_size, page_size, policy, node_pages * page_size)
    actions = [life.look, life.admit, life.grow, life.grow, life.grow, life.release, life.release]
    actions += [life.take_back, life.drop, life.evict]
    if pins:
        actions += [life.pin, life.pass_time, life.pass_time]
    for _ in range(1500):
        life.rng.choice(actions)()
        life.check()
    assert life.counts["evicted"] > 100
    assert life.counts["dropped"] > 20
    assert life.counts["taken back"] > 20
    if pins:
        assert life.counts["pinned evicted"] > 5
        assert life.counts["expired"] > 5
    while life.readers:
        life.release()
        life.check()
    life.evict()
    life.cache.flush()
    assert not len(life.cache.pins)
    assert life.allocator.free_pages == 150
