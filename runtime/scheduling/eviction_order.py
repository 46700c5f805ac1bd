"""EvictionOrder: unlocked leaves by rank, kept in order at every change.

Sorted blocks of bounded length: adding, removing and looking at the first cost a few bisections
whatever has happened before, so that no eviction pays for a thousand earlier uses.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runtime.scheduling.radix_tree import Node

BLOCK = 512


class EvictionOrder:
    """Nodes by rank, an int that no two of them share; the lowest goes first."""

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
