"""Pins: cached prefixes that clients asked to be kept for a time.

A pinned prefix goes last, and is never withheld: what a pin changes is the order of eviction alone.
So pinned pages count as available like any others, admission and retraction do not know of them,
and no request waits, is refused or starves for a pin's sake. What is evicted all the same is taken
from the end of a prefix, and what is left of it stays pinned.

A node is pinned once for every pin that ends with it and once for every child that is pinned, as it
is with locks (radix_cache.py); so pinning a prefix walks up only until it meets a node that was
pinned already. Nothing is appended to a node with which a pin ends.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from runtime.scheduling.radix_tree import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from runtime.scheduling.radix_tree import Node

MOST_PINS = 4096  # a prompt may be pinned under any number of keys
Key = tuple[str, str]  # namespace, and the name that the client gave
NO_KEY: Key = ("", "")


class Pin:
    """A prefix that is kept.

    Args:
        node: what ends with it.
        key: of all pins of a key only the newest is kept; NO_KEY: of all without a key, one for
            each prefix.
        until_s: on the scheduler's clock; only ever grows.
        asked: when it was last asked for, in requests for pins.
    """

    __slots__ = ("asked", "key", "node", "until_s")

    def __init__(self, node: Node, key: Key, until_s: float) -> None:
        self.node = node
        self.key = key
        self.until_s = until_s
        self.asked = 0


class Pins:
    """All pins, in the order in which they were last asked for.

    Args:
        most_tokens: what they may keep together; those that nobody has asked for longest give way.
        rerank: told of nodes whose worth has changed.

    Attributes:
        tokens: in pinned nodes; as of the last pass, since pins end in passes.
        evicted_tokens: that had to be evicted before their time, since start.
    """

    def __init__(self, most_tokens: int, rerank: Callable[[Node], None]) -> None:
        self.most_tokens = most_tokens
        self.tokens = 0
        self.evicted_tokens = 0
        self._rerank = rerank
        self._pins: dict[Pin, None] = {}  # the one that was asked for last is the last
        self._ending: dict[Node, dict[Key, Pin]] = {}  # by what ends with them
        self._by_key: dict[Key, Pin] = {}
        self._heap: list[tuple[float, int, Pin]] = []  # one entry a pin, and some of pins long gone
        self._asked = 0

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins)

    def __len__(self) -> int:
        return len(self._pins)

    def keep(self, node: Node, key: Key, until_s: float) -> None:
        """Pins the prefix that ends with `node`, of `most_tokens` at most, or renews its pin."""
        self._asked += 1
        pin = self._ending.get(node, {}).get(key)
        if pin is None:
            before = None if key is NO_KEY else self._by_key.get(key)
            pin = Pin(node, key, until_s)
            self._attach(pin, node)
            if before is not None:  # afterwards: what both share stays pinned all the time
                self._remove(before)
            heapq.heappush(self._heap, (until_s, self._asked, pin))
        else:
            pin.until_s = max(pin.until_s, until_s)
            del self._pins[pin]
        pin.asked = self._asked
        self._pins[pin] = None
        if key is not NO_KEY:
            self._by_key[key] = pin
        self._within_bounds()

    def bound(self, most_tokens: int) -> None:
        """Lets pins go until they keep no more than this."""
        self.most_tokens = most_tokens
        self._within_bounds()

    def _within_bounds(self) -> None:
        while self.tokens > self.most_tokens or len(self._pins) > MOST_PINS:
            self._remove(next(iter(self._pins)))
        if len(self._heap) > 2 * len(self._pins) + 64:
            self._heap = [entry for entry in self._heap if entry[2] in self._pins]
            heapq.heapify(self._heap)

    def expire(self, now: float) -> None:
        """Lets go of the pins whose time is over."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            _, number, pin = heapq.heappop(heap)
            if pin not in self._pins:
                continue
            if pin.until_s > now:  # renewed meanwhile
                heapq.heappush(heap, (pin.until_s, number, pin))
            else:
                self._remove(pin)

    def clear(self) -> None:
        """Forgets all of them; their nodes are gone."""
        self._pins.clear()
        self._ending.clear()
        self._by_key.clear()
        self._heap.clear()
        self.tokens = 0

    def _attach(self, pin: Pin, node: Node) -> None:
        self._ending.setdefault(node, {})[pin.key] = pin
        end: Node | None = node
        while end is not None and end.parent is not None:
            end.pins += 1
            if end.pins > 1:
                break
            self.tokens += _tokens(end)
            end = end.parent
        self._rerank(node)

    def _remove(self, pin: Pin) -> None:
        node: Node | None = pin.node
        assert node is not None
        ending = self._ending[node]
        del ending[pin.key]
        if not ending:
            del self._ending[node]
        self._forget(pin)
        while node is not None and node.parent is not None:
            node.pins -= 1
            if node.pins:
                break
            self.tokens -= _tokens(node)
            node = node.parent
        self._rerank(pin.node)

    def _forget(self, pin: Pin) -> None:
        del self._pins[pin]
        if self._by_key.get(pin.key) is pin:
            del self._by_key[pin.key]

    def ends_at(self, node: Node) -> bool:
        """Whether a pin ends with this node."""
        return node in self._ending

    def evicted(self, node: Node, tokens: int) -> None:
        """A leaf has lost its last `tokens` tokens, and is still there, or is about to leave."""
        if node.pins:
            self.tokens -= tokens
            self.evicted_tokens += tokens

    def left(self, nodes: Iterable[Node], parent: Node, *, counted: bool) -> None:
        """Nodes leave the tree, the first of them from below `parent`, the others from below it:
        what is left of the prefixes that ended with them ends with `parent`.

        Args: counted: their tokens are still among `tokens`.
        """
        pinned = [node for node in nodes if node.pins]
        if not pinned:
            return
        held = parent.parent is not None  # else it is a root, with which no prefix ends
        parent.pins -= held
        for node in pinned:
            self.tokens -= _tokens(node) if counted else 0
            node.pins = 0
            for pin in self._ending.pop(node, {}).values():
                if held:
                    self._move(pin, parent)
                else:
                    self._forget(pin)

    def _move(self, pin: Pin, node: Node) -> None:
        """A pin ends with a node that is pinned already, or was until now."""
        ending = self._ending.setdefault(node, {})
        other = ending.get(pin.key)
        if other is None:
            node.pins += 1
        else:  # two prefixes have become one
            pin, goes = (pin, other) if pin.asked > other.asked else (other, pin)
            pin.until_s = max(pin.until_s, goes.until_s)
            self._forget(goes)
        pin.node = node
        ending[pin.key] = pin


def _tokens(node: Node) -> int:
    return len(node.key) // TOKEN_BYTES
