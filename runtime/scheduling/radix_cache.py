"""RadixCache: which pages hold the KV of which token prefixes; locks, and what is dropped first.

The tree is radix_tree.py's. What this adds, and what shaped it:

- A node is locked once for every request whose prefix ends there, and once for every child that is
  locked. So a lock walks up only until it meets a node that was locked already, and the lock that
  follows a growing prompt costs the same at every length.
- What a node is worth is noted where a prefix ends, and handed to the parent when the node goes:
  only leaves are ever compared, and by then a leaf has heard of all uses below it. A use of a long
  path costs as much as one of a short one.
- A prompt's continuation is appended to its leaf where nobody else's prefix ends there and where
  that changes nothing about the order of eviction.
- Eviction takes pages from the tail of a leaf, as many as are missing, not the whole leaf; what is
  pinned (pins.py) goes last.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple, Protocol

from runtime.errors import InvariantError
from runtime.scheduling.pins import Pins
from runtime.scheduling.policies import EVICTION_POLICIES, PINNED
from runtime.scheduling.radix_tree import (
    NODE_TOKENS,
    TOKEN_BYTES,
    EvictionOrder,
    Place,
    RadixTree,
    descendants,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from runtime.scheduling.page_allocator import PageAllocator
    from runtime.scheduling.radix_tree import Node
    from runtime.scheduling.saved_states import SavedStates


class PrefixMatch(NamedTuple):
    """A cached prefix.

    Args:
        tokens: its length, whole pages.
        node: what ends with it, and what to lock; None when nothing matched. Valid until the next
            evict, unless locked.
    """

    tokens: int
    node: Node | None


NO_MATCH = PrefixMatch(0, None)


class Watcher(Protocol):
    """Is told what leaves the cache, before its pages can be used for anything else."""

    def removed(self, pages: Iterable[int]) -> None:
        """Pages left the tree. Some may have been told of before."""

    def cleared(self) -> None:
        """The tree was emptied."""


class RadixCache:
    """Cached prefixes, their locks, and their eviction.

    `evictable_tokens` are in nodes without locks, `protected_tokens` in nodes with locks.

    Args:
        allocator: where evicted pages go.
        eviction_policy: a name in `EVICTION_POLICIES`.
        node_tokens: most tokens of a node of the tree.
        most_pinned: tokens that pins may keep.
        states: saved beside prefixes; None: no match needs any.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        eviction_policy: str = "lru",
        node_tokens: int = NODE_TOKENS,
        most_pinned: int = 0,
        states: SavedStates | None = None,
    ) -> None:
        self.page_size = allocator.page_size
        self.eviction_policy = EVICTION_POLICIES[eviction_policy]
        self.evictable_tokens = 0
        self.protected_tokens = 0
        self.tree = RadixTree(allocator.page_size, node_tokens)
        self.order = EvictionOrder()
        self.pins = Pins(most_pinned, self._rerank)
        self.states = states
        self.watchers: list[Watcher] = []
        self._allocator = allocator
        self._tick = 0

    def match(
        self, namespace: str, key: bytes, max_tokens: int, place: Place | None = None
    ) -> PrefixMatch:
        """Longest cached prefix of `key` in whole pages, at most `max_tokens`, from which a request
        can go on; marks it as used.

        Args:
            place: where the same prompt's prefix ended when last looked up; moved. From it on, a
                match costs one dict look-up and one comparison per node; nodes are bounded.
        """
        place = place or Place()
        self.tree.seek(place, namespace, key, max_tokens)
        if self.states is None:
            node = self.end_at(place)
        else:
            node = self.states.deepest(place.node, place.tokens)
        if node is None:
            return NO_MATCH
        self._touch(node)
        return PrefixMatch(node.end, node)

    def end_at(self, place: Place) -> Node | None:
        """The node that ends with what a true place says is cached; made by a split if need be.

        Split before anyone locks it: a lock on half a node would walk another path when it is
        dropped after somebody else's split."""
        node = place.node
        if node is not None and place.tokens < node.end:
            node = place.node = self._split(node, place.tokens)
        return node

    def pages(self, node: Node | None, first: int, last: int) -> array[int]:
        """Pages of the tokens from `first` to `last` of the prefix that ends in `node`."""
        return array("i") if node is None else self.tree.pages(node, first, last)

    def insert(
        self,
        namespace: str,
        key: bytes,
        pages: array[int],
        below: Node | None = None,
    ) -> tuple[int, Node]:
        """Adds one or more whole pages. The tree takes over `pages` from the first new one on.

        Args:
            key: bytes of their tokens.
            below: the end of the prefix that they continue, locked by the caller; None where they
                begin the prompt.

        Returns: how many of these tokens were in the tree before, for which the caller's pages are
            duplicates and still the caller's; and the node that ends with them all.
        """
        tree = self.tree
        start = below or tree.root(namespace)
        node, known = tree.descend(start, len(start.key), key, 0, len(key))
        end = start.end + known // TOKEN_BYTES
        if end < node.end:
            node = self._split(node, end)
        first = known // (self.page_size * TOKEN_BYTES)
        if first < len(pages):
            node = self._append(node, key[known:], pages[first:], mine=node is below)
        self._touch(node)
        return known // TOKEN_BYTES, node

    def _append(self, node: Node, key: bytes, pages: array[int], *, mine: bool) -> Node:
        """Puts new pages behind `node`. Returns what ends with them.

        Args:
            mine: the caller's own prefix ends there.
        """
        at = node.end
        self._tick += 1
        in_place = self._may_grow(node, mine=mine)
        end = self.tree.append(node, key, pages, self._tick, in_place=in_place)
        grown = node.end - at
        if node.locks:
            self.protected_tokens += grown
            grown = 0
        self.evictable_tokens += len(pages) * self.page_size - (node.end - at) + grown
        self._rerank(node)
        return end

    def _may_grow(self, node: Node, *, mine: bool) -> bool:
        """Whether new pages may be appended to `node` itself: to a leaf where no other prefix ends,
        none that is pinned or has a state either, and, where uses are counted, none ever did."""
        if node.parent is None or node.children or node.locks != mine or node.pins or node.state:
            return False
        return not self.eviction_policy.counts_uses or node.hits <= mine

    def _split(self, node: Node, at: int) -> Node:
        """Cuts a node at a token of its prefix; returns the new upper part. What the node is worth
        stays with its end."""
        upper = self.tree.split(node, at)
        upper.locks = 1 if node.locks else 0
        upper.pins = 1 if node.pins else 0
        return upper

    def lock(self, node: Node | None) -> None:
        """Keeps the path from the root to `node`, itself included, from eviction."""
        if node is not None and node.rank:
            self.order.remove(node.rank)
            node.rank = 0
        pages = 0
        while node is not None and node.parent is not None:
            node.locks += 1
            if node.locks > 1:
                break
            pages += len(node.pages)
            node = node.parent
        self.evictable_tokens -= pages * self.page_size
        self.protected_tokens += pages * self.page_size

    def unlock(self, node: Node | None) -> None:
        """Undoes one `lock` of the same node."""
        pages = dead = 0
        while node is not None and node.parent is not None:
            if not node.locks:
                raise InvariantError("unlock of a node that holds no lock")
            node.locks -= 1
            if node.locks:
                break
            pages += len(node.pages)
            if node.dead:
                dead += len(node.pages)
                self._give_back(node)
            elif not node.children:
                self._rerank(node)
            node = node.parent
        self.protected_tokens -= pages * self.page_size
        self.evictable_tokens += (pages - dead) * self.page_size

    def count_use(self, node: Node | None) -> None:
        """Somebody was admitted with the prefix that ends in `node`, which it has locked."""
        if node is not None:
            node.hits += 1

    def move_lock(self, before: Node | None, node: Node | None) -> None:
        """A request's prefix ended in `before`, locked, and ends in `node` now: its lock and its
        use go along."""
        if node is before:
            return
        self.lock(node)
        if node is not None:
            node.hits += 1
        if before is not None:
            before.hits -= 1
        self.unlock(before)

    def set_eviction_policy(self, eviction_policy: str) -> None:
        """Ranks by another policy from now on."""
        if eviction_policy == self.eviction_policy.name:
            return
        self.eviction_policy = EVICTION_POLICIES[eviction_policy]
        leaves = [node for _, node in self.order.ranked()]
        self.order.clear()
        for node in leaves:
            node.rank = 0
            self._rerank(node)

    def _touch(self, node: Node) -> None:
        self._tick += 1
        node.last_used = self._tick
        if not node.locks:
            self._rerank(node)

    def _rerank(self, node: Node) -> None:
        """Puts a node where it belongs in the order of eviction: unlocked leaves only."""
        if node.rank:
            self.order.remove(node.rank)
            node.rank = 0
        if not (node.locks or node.children or node.dead or node.parent is None):
            node.rank = self.rank(node)
            self.order.add(node.rank, node)

    def rank(self, node: Node) -> int:
        """Where an unlocked leaf stands in the order of eviction."""
        return self.eviction_policy.rank(node) + (PINNED if node.pins else 0)

    def _inherit(self, parent: Node, node: Node) -> None:
        """A node goes; its parent was used whenever it was."""
        parent.last_used = max(parent.last_used, node.last_used)
        parent.hits += node.hits

    def evict(self, pages: int) -> int:
        """Frees `pages` pages of unlocked prefixes, the least valuable first, from their ends.

        Returns: pages freed; fewer than asked for only when nothing evictable is left.
        """
        freed = 0
        while freed < pages:
            leaf = self.order.first()
            if leaf is None:
                break
            count = min(pages - freed, self.tree.last_piece(leaf))
            self._evict_tail(leaf, count)
            freed += count
        return freed

    def _evict_tail(self, leaf: Node, count: int) -> None:
        self.evictable_tokens -= count * self.page_size
        self.pins.evicted(leaf, count * self.page_size)
        self._drop_state(leaf)
        if count < len(leaf.pages):
            taken = self.tree.trim(leaf, count)
            self._tell_removed(taken)
            self._allocator.free(taken)
            self._rerank(leaf)
            return
        self.order.remove(leaf.rank)
        leaf.rank = 0
        parent = self.tree.detach(leaf)
        self._tell_removed(leaf.pages)
        self.pins.left((leaf,), parent, counted=False)
        self._give_back(leaf)
        self._inherit(parent, leaf)
        if len(parent.children) == 1:
            self._join(parent, leaf)
        else:
            self._rerank(parent)

    def _drop_state(self, node: Node) -> None:
        """A node loses its end."""
        if node.state is not None and self.states is not None:
            self.states.give_up(node.state)

    def _tell_removed(self, pages: array[int]) -> None:
        for watcher in self.watchers:
            watcher.removed(pages)

    def _join(self, upper: Node, evicted: Node) -> None:
        """Makes a node and the only child that it has left one, unless somebody holds it or they
        are worth so different that they would be evicted apart."""
        (node,) = upper.children.values()
        if upper.parent is None or upper.locks or upper.state or self.pins.ends_at(upper):
            return
        if len(upper.pages) + len(node.pages) > self.tree.node_pages:
            return
        if self.eviction_policy.counts_uses and upper.hits:
            return
        # What is below was used later than what was evicted first.
        last_used = max(node.last_used, evicted.last_used)
        if self.eviction_policy.by_recency and upper.last_used > last_used:
            return
        self.tree.join(upper, node)
        self._inherit(node, upper)
        self._rerank(node)

    def _give_back(self, node: Node) -> None:
        """Frees all pages of a node that is out of the tree, its last piece first."""
        size = self.page_size
        for start, _ in reversed(node.pieces):
            first = (start - node.start) // size
            self._allocator.free(node.pages[first:])
            del node.pages[first:]
        node.key = bytearray()

    def flush(self) -> None:
        """Drops every prefix. Nothing may be locked."""
        if self.protected_tokens:
            raise InvariantError(f"flush with {self.protected_tokens} locked tokens")
        for node in self.tree.nodes():
            self._drop_state(node)
            self._allocator.free(node.pages)
        self.tree.clear()
        self.order.clear()
        self.pins.clear()
        self.evictable_tokens = 0
        for watcher in self.watchers:
            watcher.cleared()

    def above(self, node: Node | None, position: int) -> Node | None:
        """What ends with the first `position` tokens of the prefix that ends in `node`, split where
        need be; None where they are none."""
        while node is not None and node.start >= position:
            node = node.parent
        if node is None or node.parent is None or position == node.end:
            return node if position else None
        return self._split(node, position)

    def take_back(self, node: Node, position: int) -> None:
        """Undoes an insertion: what is behind `position` tokens of the prefix that ends in `node`
        leaves the tree, and its pages are the caller's again. Nobody has a lock on it. What was put
        below it meanwhile is dropped."""
        self.above(node, position)
        top = node
        while True:
            self.evictable_tokens -= len(top.pages) * self.page_size
            self._tell_removed(top.pages)
            top.pages = array("i")
            if top.start == position:
                break
            assert top.parent is not None
            top = top.parent
        self._cut(top)

    def drop(self, node: Node, position: int) -> None:
        """Takes what is behind `position` tokens of the prefix that ends in `node` out of the tree,
        with all that hangs below it. Locked parts keep their pages until the last lock goes."""
        self.above(node, position)
        while node.start > position:
            assert node.parent is not None
            node = node.parent
        self._cut(node)

    def _cut(self, node: Node) -> None:
        dropped = [node, *descendants(node)]
        parent = self.tree.detach(node)
        self.pins.left(dropped, parent, counted=True)
        for below in dropped:
            below.dead = True
            self._drop_state(below)
            self._tell_removed(below.pages)
            self._rerank(below)
            self._inherit(parent, below)
            if not below.locks:
                self.evictable_tokens -= len(below.pages) * self.page_size
                self._give_back(below)
        self._rerank(parent)
