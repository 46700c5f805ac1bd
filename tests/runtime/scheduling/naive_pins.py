"""Which prefixes are pinned, followed from what clients asked for, by slow, plain code."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.request import Request
from tests.runtime.scheduling.naive_books import NaiveBooks, Prefix


@dataclass
class Kept:
    """A pinned prefix. Args: key: of each but "" there is one in a namespace."""

    prefix: Prefix
    key: str
    until: float


@dataclass
class NaivePins:
    """What is pinned.

    Args: kept: the one that was asked for last is the last.
    """

    books: NaiveBooks
    kept: list[Kept] = field(default_factory=list)
    before: dict[Prefix, int] = field(default_factory=dict)  # cached before this pass, with pages
    read_before: set[int] = field(default_factory=set)  # pages of these that somebody read then

    def planning(self, now: float) -> None:
        """A pass begins, with which pins end whose time is over."""
        self.kept = [one for one in self.kept if one.until > now]
        if self.kept:
            self.before = self.books.heads()
            self.read_before = self._read(self.before)

    def bounded(self) -> None:
        """The bound of all pins may be a new one: those that nobody has asked for longest go."""
        config = self.books.scheduler.config
        most = int(config.pin_share * config.usable_tokens)
        while len(self._pinned()) * self.books.page_size > most:
            del self.kept[0]

    def keep_prompt(self, request: Request, end: int, now: float) -> None:
        """The first `end` tokens of a request were computed: they are kept as it asks, where they
        are cached."""
        size, config = self.books.page_size, self.books.scheduler.config
        most = int(config.pin_share * config.usable_tokens)
        tokens = (*request.input_ids, *request.output_ids)[:end]
        whole = request.namespace, tokens[: end // size * size]
        if not request.pins or whole not in self.books.heads():
            return
        for wish in request.pins:
            prefix = whole[0], tokens[: min(wish.tokens, most, end) // size * size]
            if prefix[1]:
                self._keep(Kept(prefix, wish.key, now + wish.ttl_s))
                self.bounded()

    def _keep(self, new: Kept) -> None:
        for one in [*self.kept]:
            same = (one.key, one.prefix) == (new.key, new.prefix)
            if same or (new.key and (one.key, one.prefix[0]) == (new.key, new.prefix[0])):
                self.kept.remove(one)
                new.until = max(new.until, one.until) if same else new.until
        self.kept.append(new)

    def shorten(self, before: dict[Prefix, int]) -> None:
        """What was dropped is not kept any more, but what stands before it is.

        Args: before: what was cached, with pages; in the place of what was dropped there may be
            others.
        """
        heads = dict(self.books.heads().items() & before.items()) if self.kept else {}
        shortened: dict[tuple[str, Prefix], Kept] = {}
        for one in self.kept:
            name, tokens = one.prefix
            while tokens and (name, tokens) not in heads:
                tokens = tokens[: -self.books.page_size]
            if tokens:
                other = shortened.pop((one.key, (name, tokens)), one)
                kept = Kept((name, tokens), one.key, max(one.until, other.until))
                shortened[one.key, kept.prefix] = kept
        self.kept = list(shortened.values())

    def check_evictions(self) -> None:
        """What is pinned has lost nothing in this pass, unless nothing else could go."""
        if not self.kept:
            return  # nor are there any of the scheduler's, as the next recount sees
        pinned, heads, actual = self._pinned(), self.books.heads(), self._pins()
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

    def _read(self, heads: dict[Prefix, int]) -> set[int]:
        """Pages that cannot go: requests have them, or what is to be loaded will hang there."""
        read = {page for request in self.books.holders for page in request.pages}
        for name, tokens in self.books.load_prefixes.values():
            ends = range(self.books.page_size, len(tokens) + 1, self.books.page_size)
            read.update(heads.get((name, tokens[:end]), 0) for end in ends)
        return read

    def _pins(self) -> list[Kept]:
        """The scheduler's."""
        pins = list(self.books.scheduler._memory.cache.pins)
        tree = self.books.tree() if pins else {}
        prefixes = {id(node): prefix for prefix, (node, _) in tree.items()}
        return [Kept(prefixes[id(pin.node)], pin.key[1], pin.until_s) for pin in pins]

    def _pinned(self) -> set[Prefix]:
        """Every cached page that is kept, by its prefix."""
        return {
            (name, tokens[:end])
            for name, tokens in (one.prefix for one in self.kept)
            for end in range(self.books.page_size, len(tokens) + 1, self.books.page_size)
        }

    def check(self) -> None:
        """The scheduler has just these pins, within their bound."""
        pins = self.books.scheduler._memory.cache.pins
        if not (self.kept or pins.tokens or len(pins)):
            return
        assert self._pins() == self.kept
        pinned = self.books.scheduler.statistics().pinned_tokens
        config = self.books.scheduler.config
        assert pinned == len(self._pinned()) * self.books.page_size
        assert pinned <= config.pin_share * config.usable_tokens


def _beginnings(head: Prefix) -> set[Prefix]:
    return {(head[0], head[1][:end]) for end in range(len(head[1]) + 1)}
