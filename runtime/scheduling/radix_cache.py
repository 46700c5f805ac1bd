"""RadixCache: which pages hold the KV of which token prefixes.

A tree per namespace. Every edge is a run of whole pages, kept as the bytes of its token ids (four
per token), so that a comparison is one memcmp however long the run is; children are found by the
bytes of their first page. Source: RadixAttention, arXiv:2312.07104, section 3.

What shaped it:
- A match that ends inside a node splits it before anyone locks it. A lock on half a node would
  walk another path when it is dropped after somebody else's split.
- A split makes a new node for the *upper* part and lets the old object keep the lower one, so a
  lock holder's node stays the end of the holder's own prefix.
- Eviction takes pages from the tail of a leaf, as many as are missing, not the whole leaf.
- Leaves stand in a heap with the rank they had when they were pushed. Ranks only grow, so an entry
  that has become stale is found when popped and pushed again: a use costs nothing there.
"""

from __future__ import annotations

import heapq
from array import array
from typing import TYPE_CHECKING, NamedTuple

from runtime.errors import InvariantError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runtime.scheduling.page_allocator import PageAllocator

TOKEN_BYTES = 4


class Node:
    """A run of cached pages below its parent's. A root has none; its key is its namespace.

    `locks` counts the requests whose prefix ends here or below. `step` is the launched step that
    wrote the KV; a `dead` node was written by a step that failed: it is out of the tree and goes
    when its last lock does.
    """

    __slots__ = (
        "children",
        "created",
        "dead",
        "hits",
        "in_heap",
        "key",
        "last_used",
        "locks",
        "pages",
        "parent",
        "step",
    )

    def __init__(self, key: bytes, pages: array[int], parent: Node | None, step: int) -> None:
        self.key = key
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.step = step
        self.locks = 0
        self.last_used = 0
        self.hits = 0
        self.created = 0
        self.in_heap = False
        self.dead = False


class PrefixMatch(NamedTuple):
    """A cached prefix.

    Args:
        tokens: its length, whole pages.
        pages: in position order.
        node: what to lock; None when nothing matched. Valid until the next evict, unless locked.
    """

    tokens: int
    pages: array[int]
    node: Node | None


NO_MATCH = PrefixMatch(0, array("i"), None)


class RadixCache:
    """Cached prefixes, their locks, and their eviction.

    `evictable_tokens` are in nodes without locks, `protected_tokens` in nodes with locks.

    Args:
        allocator: where evicted pages go.
        eviction_policy: "lru", "lfu" or "fifo".
    """

    def __init__(self, allocator: PageAllocator, eviction_policy: str = "lru") -> None:
        self.page_size = allocator.page_size
        self.eviction_policy = eviction_policy
        self.evictable_tokens = 0
        self.protected_tokens = 0
        self._allocator = allocator
        self._page_bytes = allocator.page_size * TOKEN_BYTES
        self._roots: dict[bytes, Node] = {}
        self._heap: list[tuple[tuple[int, int], int, Node]] = []
        self._tick = 0

    # Look-up

    def match(self, namespace: str, key: bytes, max_tokens: int) -> PrefixMatch:
        """Longest cached prefix of `key` in whole pages, at most `max_tokens`; marks it as used.

        Cost: one comparison of bytes and one dict look-up per node on the path.
        """
        path, partial, partial_bytes = self._walk(namespace, key, max_tokens)
        if partial is not None:
            path.append(self._split(partial, partial_bytes))
        if not path:
            return NO_MATCH
        self._use(path)
        pages = array("i")
        for node in path:
            pages.extend(node.pages)
        return PrefixMatch(len(pages) * self.page_size, pages, path[-1])

    def match_length(self, namespace: str, key: bytes, max_tokens: int) -> int:
        """Tokens that `match` would find. Changes nothing."""
        path, _, partial_bytes = self._walk(namespace, key, max_tokens)
        return (sum(len(node.key) for node in path) + partial_bytes) // TOKEN_BYTES

    def match_path(self, namespace: str, key: bytes, max_tokens: int) -> list[Node]:
        """Nodes on the matched path, from the top; the last may match in part."""
        path, partial, _ = self._walk(namespace, key, max_tokens)
        return path if partial is None else [*path, partial]

    def _walk(
        self, namespace: str, key: bytes, max_tokens: int
    ) -> tuple[list[Node], Node | None, int]:
        """(nodes matched whole, the node matched in part or None, matched bytes of it)."""
        path: list[Node] = []
        node = self._roots.get(_root_key(namespace))
        if node is None:
            return path, None, 0
        unit = self._page_bytes
        end = min(len(key), max(max_tokens, 0) * TOKEN_BYTES) // unit * unit
        at = 0
        while at < end:
            child = node.children.get(key[at : at + unit])
            if child is None:
                break
            size = len(child.key)
            if at + size > end or not key.startswith(child.key, at):
                return path, child, self._common_bytes(child.key, key, at, end)
            path.append(child)
            node = child
            at += size
        return path, None, 0

    def _common_bytes(self, run: bytes, key: bytes, at: int, end: int) -> int:
        """Bytes of whole pages shared by `run` and key[at:end]; at least one page is."""
        unit = self._page_bytes
        low, high = 1, min(len(run), end - at) // unit
        while low < high:
            middle = (low + high + 1) // 2
            if key.startswith(run[: middle * unit], at):
                low = middle
            else:
                high = middle - 1
        return low * unit

    def _use(self, path: list[Node]) -> None:
        self._tick += 1
        for node in path:
            node.last_used = self._tick
            node.hits += 1

    # Change

    def insert(
        self, namespace: str, key: bytes, pages: array[int], step: int
    ) -> tuple[int, PrefixMatch]:
        """Adds a prefix of one or more whole pages. The tree takes over `pages` from the first new
        one on.

        Args:
            step: the launched step that wrote the newest of these tokens.

        Returns:
            Tokens that were in the tree before, and the whole prefix as it now is in the tree:
            for the tokens that were there the caller's pages are duplicates, still the caller's.
        """
        path, partial, partial_bytes = self._walk(namespace, key, len(key) // TOKEN_BYTES)
        if partial is not None:
            path.append(self._split(partial, partial_bytes))
        tree_pages = array("i")
        for node in path:
            tree_pages.extend(node.pages)
        known = len(tree_pages)
        if known < len(pages):
            parent = path[-1] if path else self._root(namespace)
            path.append(self._add_leaf(parent, key, pages, known, step))
            tree_pages.extend(pages[known:])
        self._use(path)
        match = PrefixMatch(len(tree_pages) * self.page_size, tree_pages, path[-1])
        return known * self.page_size, match

    def _root(self, namespace: str) -> Node:
        name = _root_key(namespace)
        root = self._roots.get(name)
        if root is None:
            root = self._roots[name] = Node(name, array("i"), None, -1)
        return root

    def _add_leaf(self, parent: Node, key: bytes, pages: array[int], known: int, step: int) -> Node:
        run = key[known * self._page_bytes :]
        leaf = Node(run, pages[known:], parent, step)
        self._tick += 1
        leaf.created = self._tick
        parent.children[run[: self._page_bytes]] = leaf
        self.evictable_tokens += len(leaf.pages) * self.page_size
        self._push(leaf)
        return leaf

    def _split(self, node: Node, at: int) -> Node:
        """Cuts a node after `at` bytes; returns the new upper part."""
        parent = node.parent
        assert parent is not None
        pages = at // self._page_bytes
        upper = Node(node.key[:at], node.pages[:pages], parent, node.step)
        upper.locks = node.locks
        upper.last_used, upper.hits, upper.created = node.last_used, node.hits, node.created
        parent.children[node.key[: self._page_bytes]] = upper
        node.key, node.pages, node.parent = node.key[at:], node.pages[pages:], upper
        upper.children[node.key[: self._page_bytes]] = node
        return upper

    # Locks

    def lock(self, node: Node | None) -> None:
        """Keeps the path from the root to `node`, itself included, from eviction."""
        while node is not None and node.parent is not None:
            if not node.locks:
                size = len(node.pages) * self.page_size
                self.evictable_tokens -= size
                self.protected_tokens += size
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node | None) -> None:
        """Undoes one `lock` of the same node."""
        while node is not None and node.parent is not None:
            if not node.locks:
                raise InvariantError("unlock of a node that holds no lock")
            node.locks -= 1
            if not node.locks:
                self._unlocked(node)
            node = node.parent

    def _unlocked(self, node: Node) -> None:
        size = len(node.pages) * self.page_size
        self.protected_tokens -= size
        if node.dead:
            self._allocator.free(node.pages)
            node.pages = array("i")
            return
        self.evictable_tokens += size
        if not node.children:
            self._push(node)

    # Eviction

    def set_eviction_policy(self, eviction_policy: str) -> None:
        """Ranks by another policy from now on."""
        if eviction_policy == self.eviction_policy:
            return
        self.eviction_policy = eviction_policy
        entries, self._heap = self._heap, []
        for _, _, node in entries:
            node.in_heap = False
            self._push(node)

    def _rank(self, node: Node) -> tuple[int, int]:
        if self.eviction_policy == "lfu":
            return node.hits, node.last_used
        if self.eviction_policy == "fifo":
            return node.created, 0
        return node.last_used, 0

    def _push(self, node: Node) -> None:
        if not node.in_heap:
            node.in_heap = True
            self._tick += 1
            heapq.heappush(self._heap, (self._rank(node), self._tick, node))

    def evict(self, pages: int) -> int:
        """Frees `pages` pages of unlocked prefixes, the least valuable first, from their ends.

        Returns: pages freed; fewer than asked for only when nothing evictable is left.
        """
        freed = 0
        while freed < pages and self._heap:
            rank, _, node = heapq.heappop(self._heap)
            node.in_heap = False
            if node.locks or node.children or node.dead or not node.pages:
                continue
            if self._rank(node) != rank:
                self._push(node)
                continue
            freed += self._evict_tail(node, pages - freed)
        return freed

    def _evict_tail(self, leaf: Node, pages: int) -> int:
        count = min(pages, len(leaf.pages))
        keep = len(leaf.pages) - count
        self._allocator.free(leaf.pages[keep:])
        self.evictable_tokens -= count * self.page_size
        if keep:
            leaf.pages = leaf.pages[:keep]
            leaf.key = leaf.key[: keep * self._page_bytes]
            self._push(leaf)
        else:
            self._detach(leaf)
        return count

    def _detach(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key[: self._page_bytes]]
        leaf.key, leaf.pages = b"", array("i")
        self._lost_child(parent)

    def _lost_child(self, parent: Node) -> None:
        if parent.children:
            return
        if parent.parent is None:
            # One salt per user must not leave one root per user behind.
            del self._roots[parent.key]
        elif not parent.locks:
            self._push(parent)

    def flush(self) -> None:
        """Drops every prefix. Nothing may be locked."""
        if self.protected_tokens:
            raise InvariantError(f"flush with {self.protected_tokens} locked tokens")
        for node in self.nodes():
            self._allocator.free(node.pages)
        self._roots.clear()
        self._heap.clear()
        self.evictable_tokens = 0

    def drop_written_by(self, step: int) -> None:
        """Takes what `step` wrote out of the tree, with all that hangs below it. Locked parts keep
        their pages until the last lock goes."""
        for node in [n for n in self.nodes() if n.step == step and not n.dead]:
            parent = node.parent
            if node.dead or parent is None:
                continue
            del parent.children[node.key[: self._page_bytes]]
            for below in [node, *_descendants(node)]:
                self._kill(below)
            self._lost_child(parent)

    def _kill(self, node: Node) -> None:
        node.dead = True
        if not node.locks:
            self.evictable_tokens -= len(node.pages) * self.page_size
            self._allocator.free(node.pages)
            node.pages = array("i")

    def nodes(self) -> Iterator[Node]:
        """Every node of the tree, roots left out. For recounts and rare sweeps."""
        for root in self._roots.values():
            yield from _descendants(root)


def _root_key(namespace: str) -> bytes:
    return namespace.encode("utf-8", "surrogatepass")


def _descendants(node: Node) -> Iterator[Node]:
    stack = list(node.children.values())
    while stack:
        below = stack.pop()
        yield below
        stack.extend(below.children.values())


def is_dead(node: Node | None) -> bool:
    """Whether the path to `node` leads through KV that a failed step wrote."""
    while node is not None:
        if node.dead:
            return True
        node = node.parent
    return False
