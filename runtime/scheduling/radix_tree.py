"""RadixTree: the shape of the cache, and how prompts are followed through it. EvictionOrder: its
leaves by their worth.

A tree per namespace. A node is a run of whole pages: the bytes of its token ids (four per token),
so that a comparison is one memcmp, and the pages that hold their KV. Children are found by the
bytes of their first page. Source: RadixAttention, arXiv:2312.07104, section 3.

What shaped it:
- A continuation is appended to its leaf, so that a prompt computed in small chunks is not a chain
  of small nodes. But no node grows beyond NODE_TOKENS: splitting, cutting or joining one costs a
  few microseconds at most.
- A split makes a new node for the *upper* part and lets the old object keep the lower one, so that
  whoever holds a lock on a node goes on holding the end of its own prefix. Where two nodes become
  one the lower object stays as well.
- A node knows how many tokens stand before it. How far a prompt is cached is remembered as a
  `Place`, a node and a number of tokens; a later look takes back what was lost since, and goes on
  from there instead of from the root.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN_BYTES = 4
NODE_TOKENS = 8192
BLOCK = 512  # ranks; of the order of eviction
VISIT_BYTES = 8192  # of a node's key that a walk compares in about a microsecond
NO_LIMIT = 1 << 60


class Node:
    """A run of cached pages below its parent's. A root has none, and no parent.

    Args:
        start: tokens before it, in whole pages.
        key: bytes of its token ids.
        pages: where their KV is.

    `pieces` are the appends that it was made by: (position of the first token, when). `lost_at` is
    the tree's count of losses when it last lost pages. The rest is the cache's: `locks` counts the
    requests whose prefix ends here and the children that are locked; `last_used` and `hits`
    (admissions) speak of prefixes that end here, or ended below in what is gone; `rank` is its
    place in the order of eviction, 0: not in it; `pins` counts the pins that end here and the
    children that are pinned; `state` is the recurrent state at its end, where one is kept. A `dead`
    node was written by a step that failed: it is out of the tree and goes when its last lock does.
    """

    __slots__ = (
        "children",
        "dead",
        "hits",
        "key",
        "last_used",
        "locks",
        "lost_at",
        "namespace",
        "pages",
        "parent",
        "pieces",
        "pins",
        "rank",
        "start",
        "state",
    )

    def __init__(self, parent: Node | None, start: int, key: bytearray, pages: array[int]) -> None:
        self.parent = parent
        self.start = start
        self.key = key
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.pieces: tuple[tuple[int, int], ...] = ()
        self.namespace = ""  # of a root
        self.lost_at = 0
        self.locks = 0
        self.last_used = 0
        self.hits = 0
        self.rank = 0
        self.pins = 0
        self.dead = False
        self.state: SavedState | None = None

    @property
    def end(self) -> int:
        """Tokens of the prefix that ends with this node."""
        return self.start + len(self.key) // TOKEN_BYTES


class SavedState:
    """A recurrent state that is kept (saved_states.py).

    Args:
        slot: where it is; 0: it has been given up.
        position: tokens that it has seen.
        step: the step that writes it.

    `node` ends with these tokens; None until they are in the cache.
    """

    __slots__ = ("node", "position", "slot", "step")

    def __init__(self, slot: int, position: int, step: int) -> None:
        self.slot = slot
        self.position = position
        self.step = step
        self.node: Node | None = None


class Place:
    """How far a prompt is cached, remembered from one look to the next.

    Args:
        node: holds its last token, perhaps others behind it; None where nothing is cached.
        tokens: whole pages.
        seen: the tree's count of losses when this was true.
    """

    __slots__ = ("node", "seen", "tokens")

    def __init__(self, node: Node | None = None, tokens: int = 0, seen: int = 0) -> None:
        self.node = node
        self.tokens = tokens
        self.seen = seen


class RadixTree:
    """Nodes, without any opinion about their worth.

    Args:
        node_tokens: most tokens of a node, in whole pages, one at least.
    """

    def __init__(self, page_size: int, node_tokens: int = NODE_TOKENS) -> None:
        self.page_size = page_size
        self.roots: dict[str, Node] = {}
        self.losses = 0  # times that something was taken out
        self.visits = 0  # by walks, in all: one per node, more for a long one
        self.node_pages = max(node_tokens // page_size, 1)
        self._page_bytes = page_size * TOKEN_BYTES

    def seek(
        self, place: Place, namespace: str, key: bytes, limit: int, most_visits: int = NO_LIMIT
    ) -> None:
        """Moves a prompt's place to the end of its longest cached prefix in whole pages.

        Args:
            key: bytes of the prompt's tokens; what the place remembers of them has not changed.
            limit: most tokens that may match.
            most_visits: about as many microseconds; a walk cut short goes on from there the next
                time.
        """
        unit = self._page_bytes
        end = min(len(key), max(limit, 0) * TOKEN_BYTES) // unit * unit
        node = place.node
        if node is None:
            node = self.roots.get(namespace)
            place.seen = self.losses
        elif place.seen != self.losses or not node.start < place.tokens <= end // TOKEN_BYTES:
            self.settle(place, end // TOKEN_BYTES)
            node = place.node or self.roots.get(namespace)
        if node is None:
            return
        inside = (place.tokens - node.start) * TOKEN_BYTES
        node, at = self.descend(node, inside, key, place.tokens * TOKEN_BYTES, end, most_visits)
        place.tokens = at // TOKEN_BYTES
        place.node = node if at else None

    def settle(self, place: Place, limit: int) -> None:
        """Takes back what was lost of a place since it was last true, and what is over `limit`."""
        node, tokens = place.node, min(place.tokens, limit)
        while node is not None:
            if node.lost_at > place.seen:
                tokens = min(tokens, node.start)
            if tokens > node.start:
                break
            node = node.parent
        place.node, place.tokens, place.seen = node, tokens, self.losses

    def descend(
        self, node: Node, inside: int, key: bytes, at: int, end: int, most_visits: int = NO_LIMIT
    ) -> tuple[Node, int]:
        """Follows key[at:end], whole pages, from `inside` bytes behind the start of `node`.

        Returns: the node that holds the last byte found (else `node`), and where in `key` it ends.
        """
        unit = self._page_bytes
        visits = 0
        while at < end:
            run = node.key
            left = len(run) - inside
            if left:
                rest = run[inside:] if inside else run
                if left > end - at or not key.startswith(rest, at):
                    at += self.shared_bytes(rest, key, at, end)
                    break
                at += left
                if at >= end:
                    break
            child = node.children.get(key[at : at + unit])
            if child is None or visits >= most_visits:
                break
            node, inside = child, 0
            visits += 1 + (len(child.key) - 1) // VISIT_BYTES
        self.visits += visits
        return node, at

    def shared_bytes(self, run: bytes | bytearray, key: bytes, at: int, end: int) -> int:
        """Bytes of whole pages that `run` and key[at:end] begin with alike; not all of `run`."""
        unit = self._page_bytes
        low, high = 0, min(len(run), end - at) // unit
        if not key.startswith(run[:unit], at):
            return 0
        while low < high:
            middle = (low + high + 1) // 2
            if key.startswith(run[: middle * unit], at):
                low = middle
            else:
                high = middle - 1
        return low * unit

    def pages(self, node: Node, first: int, last: int) -> array[int]:
        """Pages of the tokens from `first` to `last`, whole pages, on the path to `node`."""
        parts: list[array[int]] = []
        top = first
        above: Node | None = node
        while above is not None and above.end > first:
            parts.append(above.pages)
            top = above.start
            above = above.parent
        found = array("i")
        for part in reversed(parts):
            found.extend(part)
        size = self.page_size
        del found[(last - top) // size :], found[: (first - top) // size]
        return found

    def root(self, namespace: str) -> Node:
        """Where the prompts of a namespace begin."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(None, 0, bytearray(), array("i"))
            root.namespace = namespace
        return root

    def append(
        self, node: Node, key: bytes, pages: array[int], when: int, *, in_place: bool
    ) -> Node:
        """Puts pages behind the end of `node`: into it as far as it has room and `in_place` allows,
        the others into new nodes below it. Returns the last of these nodes."""
        done = 0
        if in_place:
            done = min(self.node_pages - len(node.pages), len(pages))
            if done:
                node.pieces += ((node.end, when),)
                node.key += key[: done * self._page_bytes]
                node.pages.extend(pages[:done])
        while done < len(pages):
            stop = min(done + self.node_pages, len(pages))
            run = key[done * self._page_bytes : stop * self._page_bytes]
            below = Node(node, node.end, bytearray(run), pages[done:stop])
            below.pieces = ((below.start, when),)
            node.children[run[: self._page_bytes]] = below
            node, done = below, stop
        return node

    def split(self, node: Node, at: int) -> Node:
        """Cuts a node in two at `at` tokens of its prefix; returns the new upper part."""
        parent = node.parent
        assert parent is not None
        inside = (at - node.start) * TOKEN_BYTES
        pages = (at - node.start) // self.page_size
        upper = Node(parent, node.start, node.key[:inside], node.pages[:pages])
        upper.lost_at = node.lost_at
        upper.pieces = tuple([piece for piece in node.pieces if piece[0] < at])
        parent.children[self._first_page(node)] = upper
        del node.key[:inside], node.pages[:pages]
        later = [piece for piece in node.pieces if piece[0] > at]
        node.pieces = ((at, node.pieces[-1 - len(later)][1]), *later)
        node.start, node.parent = at, upper
        upper.children[self._first_page(node)] = node
        return upper

    def join(self, upper: Node, node: Node) -> None:
        """Makes `node`, the only child of `upper`, one with it."""
        above = upper.parent
        assert above is not None
        above.children[self._first_page(upper)] = node
        node.start, node.parent = upper.start, above
        node.pieces = upper.pieces + node.pieces
        node.key[:0] = upper.key
        node.pages[:0] = upper.pages
        node.lost_at = max(node.lost_at, upper.lost_at)
        # Whoever remembers the upper one, or what was below it, is led to the one that stays.
        upper.start, upper.parent = NO_LIMIT, node

    def last_piece(self, node: Node) -> int:
        """Pages of the last of the appends that a node was made by."""
        return (node.end - node.pieces[-1][0]) // self.page_size

    def trim(self, node: Node, count: int) -> array[int]:
        """Takes off a node's last `count` pages, at most its last piece, but not all it has."""
        taken = node.pages[-count:]
        del node.pages[-count:], node.key[-count * self._page_bytes :]
        if node.end == node.pieces[-1][0]:
            node.pieces = node.pieces[:-1]
        self._lost(node)
        return taken

    def detach(self, node: Node) -> Node:
        """Takes a node with all below it out of the tree. Returns its parent."""
        parent = node.parent
        assert parent is not None
        del parent.children[self._first_page(node)]
        self._lost(node)
        for below in descendants(node):
            below.lost_at = self.losses
        if not parent.children and parent.parent is None:
            # One salt per user must not leave one root per user behind.
            del self.roots[parent.namespace]
        return parent

    def clear(self) -> None:
        """Takes everything out."""
        self.losses += 1
        for node in self.nodes():
            node.lost_at = self.losses
        self.roots.clear()

    def _lost(self, node: Node) -> None:
        self.losses += 1
        node.lost_at = self.losses

    def _first_page(self, node: Node) -> bytes:
        return bytes(node.key[: self._page_bytes])

    def nodes(self) -> Iterator[Node]:
        """Every node, roots left out. For recounts and rare sweeps."""
        for root in self.roots.values():
            yield from descendants(root)


def descendants(node: Node) -> Iterator[Node]:
    """All nodes below one, each after its parent."""
    stack = list(node.children.values())
    while stack:
        below = stack.pop()
        yield below
        stack.extend(below.children.values())


class EvictionOrder:
    """Unlocked leaves by rank, an int that no two of them share, in order at every change; the
    lowest goes first.

    Sorted blocks of bounded length: adding, removing and looking at the first cost a few bisections
    whatever has happened before, so that no eviction pays for a thousand earlier uses.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, Node] = {}
        self._blocks: list[list[int]] = []  # ranks, ascending; none is empty
        self._lasts: list[int] = []  # the last rank of each block

    def __len__(self) -> int:
        return len(self._nodes)

    def first(self) -> Node | None:
        """The node of the lowest rank."""
        return self._nodes[self._blocks[0][0]] if self._blocks else None

    def add(self, rank: int, node: Node) -> None:
        self._nodes[rank] = node
        blocks, lasts = self._blocks, self._lasts
        at = bisect_left(lasts, rank)
        if at < len(lasts):
            insort(blocks[at], rank)
        elif lasts and len(blocks[-1]) < BLOCK:
            blocks[-1].append(rank)
            lasts[-1] = rank
        else:
            blocks.append([rank])
            lasts.append(rank)
        if at < len(blocks) and len(blocks[at]) > 2 * BLOCK:
            blocks[at : at + 1] = [blocks[at][:BLOCK], blocks[at][BLOCK:]]
            lasts.insert(at, blocks[at][-1])

    def remove(self, rank: int) -> None:
        """Takes out the node of this rank."""
        del self._nodes[rank]
        at = bisect_left(self._lasts, rank)
        block = self._blocks[at]
        del block[bisect_left(block, rank)]
        if not block:
            del self._blocks[at], self._lasts[at]
        else:
            self._lasts[at] = block[-1]

    def ranked(self) -> Iterator[tuple[int, Node]]:
        """All ranks, ascending as the blocks have them, with their nodes. For recounts."""
        for block in self._blocks:
            for rank in block:
                yield rank, self._nodes[rank]

    def clear(self) -> None:
        self._nodes.clear()
        self._blocks.clear()
        self._lasts.clear()
