"""Policies: how the waiting requests of one priority are ordered, and what the cache drops first.

A policy is an object with a name and a key. A new one is an entry in `POLICIES` or in
`EVICTION_POLICIES`; the option and its help follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runtime.request import Request
    from runtime.scheduling.radix_tree import Node

TREE_WINDOW = 128
SORT_WINDOW = 512


@dataclass(frozen=True, slots=True)
class Policy:
    """One order of the queue.

    Args:
        name: as in the options.
        keys: (requests of the window, tokens computed since start) to what each is sorted by,
            smallest first; None: by arrival.
        needs_matches: `record.place` of those requests is brought up to date before.
        cache_aware: without a cache it is fcfs.
        window: how many of the oldest it orders.
        most_waiting: a longer queue is served by arrival; None: any length is ordered.
        shuffled: instead of by keys, in a random order.
    """

    name: str
    keys: Callable[[Sequence[Request], int], Sequence[float]] | None = None
    needs_matches: bool = False
    cache_aware: bool = False
    window: int = SORT_WINDOW
    most_waiting: int | None = None
    shuffled: bool = False


def _longest_prefix(requests: Sequence[Request], computed_tokens: int) -> list[float]:
    return [-request.scheduling.place.tokens for request in requests]


def _longest_output(requests: Sequence[Request], computed_tokens: int) -> list[float]:
    return [-request.max_new_tokens for request in requests]


def _response_ratio(requests: Sequence[Request], computed_tokens: int) -> list[float]:
    """Highest (wait + service) / service first. Service is what is still to compute: on prompts
    with shared prefixes, counting the cached part as well made this no better than fcfs."""
    keys: list[float] = []
    for request in requests:
        record = request.scheduling
        tokens = len(request.input_ids) + len(request.output_ids) - record.place.tokens
        service = tokens + request.remaining_tokens
        keys.append(-(1.0 + (computed_tokens - record.arrival_tokens) / service))
    return keys


def _depth_first(requests: Sequence[Request], computed_tokens: int) -> list[float]:
    """Each request's turn in a walk over the cached tree, at each node into the child with the most
    waiting requests below it first; the deepest first at one node. What matches nothing comes last.

    Paths are climbed from their ends to where an earlier one has passed, so that every node of the
    tree is visited once.
    """
    children: dict[Node | None, list[Node]] = {}
    weight: dict[Node, int] = {}
    ending: dict[Node | None, list[int]] = {}
    for index, request in enumerate(requests):
        node = request.scheduling.place.node
        ending.setdefault(node, []).append(index)
        while node is not None and node not in weight:
            weight[node] = 0
            above = _above(node)
            children.setdefault(above, []).append(node)
            node = above
    for node in sorted(weight, key=lambda node: -node.start):  # each before its parent
        weight[node] += len(ending.get(node, ()))
        above = _above(node)
        if above is not None:
            weight[above] += weight[node]
    turns = [0.0] * len(requests)
    turn = 0
    stack: list[tuple[Node | None, bool]] = [(None, False)]
    while stack:
        place, below_done = stack.pop()
        if below_done:
            ends = ending.get(place, [])
            for index in sorted(ends, key=lambda i: -requests[i].scheduling.place.tokens):
                turns[index] = turn
                turn += 1
            continue
        stack.append((place, True))
        heaviest_last = sorted(children.get(place, ()), key=lambda node: -weight[node])
        stack.extend((child, False) for child in reversed(heaviest_last))
    return turns


def _above(node: Node) -> Node | None:
    """A node's parent; None for what begins a prompt."""
    parent = node.parent
    return None if parent is None or parent.parent is None else parent


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("fcfs"),
        Policy(
            "lpm",
            _longest_prefix,
            needs_matches=True,
            cache_aware=True,
            window=TREE_WINDOW,
            most_waiting=TREE_WINDOW,
        ),
        Policy(
            "dfs-weight", _depth_first, needs_matches=True, cache_aware=True, window=TREE_WINDOW
        ),
        Policy("lof", _longest_output),
        Policy("random", shuffled=True),
        Policy("hrrn", _response_ratio, needs_matches=True, window=TREE_WINDOW),
    )
}


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """What an unlocked leaf of the cache is worth.

    Args:
        rank: the leaf of the lowest rank goes first. Unique among leaves; never 0.
        by_recency: a later use is worth more whatever came before it.
        counts_uses: every use is worth something, so that the parts of a node must have the same.
    """

    name: str
    rank: Callable[[Node], int]
    by_recency: bool = False
    counts_uses: bool = False


_USE = 1 << 48  # more than there will ever be moments
PINNED = 1 << 96  # above the rank of whatever is not pinned

EVICTION_POLICIES = {
    policy.name: policy
    for policy in (
        EvictionPolicy("lru", lambda leaf: leaf.last_used, by_recency=True),
        EvictionPolicy("lfu", lambda leaf: leaf.hits * _USE + leaf.last_used, counts_uses=True),
        EvictionPolicy("fifo", lambda leaf: leaf.pieces[-1][1]),
    )
}
