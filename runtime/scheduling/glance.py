"""What somebody who watches the scheduler sees of it several times a second: who waits, who holds
what, what is cached. Bounded in count, and taking it changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from runtime.scheduling.statistics import debug_record

if TYPE_CHECKING:
    from collections.abc import Iterable

    from runtime.request import Request
    from runtime.scheduling.lifecycle import Lifecycle
    from runtime.scheduling.radix_tree import Node, RadixTree
    from runtime.scheduling.statistics import RequestDebug

LOOKS_PER_RUN = 32


class Holder(NamedTuple):
    """What an admitted request holds, and has still to do.

    Args:
        prefill_left: tokens of its prompt that no launched step computes.
        output_tokens, max_new_tokens: launched, and allowed.
        kv_tokens: that it holds.
    """

    prefill_left: int
    output_tokens: int
    max_new_tokens: int
    kv_tokens: int


class CachedRun(NamedTuple):
    """Cached tokens that no branch divides: a node of the tree.

    Args:
        start, end: where they stand in every prompt that begins with them.
        holders: requests and further runs that keep it from eviction.
        uses: admissions whose cached prefix ended here.
        branches: runs that continue it.
    """

    start: int
    end: int
    holders: int
    uses: int
    branches: int


@dataclass(frozen=True, slots=True)
class Glance:
    """The scheduler as somebody who watches it sees it: at most so many of everything, so that
    taking it costs the same whatever waits and is cached.

    Args:
        waiting: the first of the queue, by priority and arrival. Policies other than fcfs may
            admit in another order.
        compiling: the first of those that wait for their grammar.
        admitted: the first of those that hold a row.
        holders: all of these.
        runs: the largest cached runs, the largest first.
        whole_tree: all of the tree was looked at for them.
    """

    waiting: list[RequestDebug]
    compiling: list[RequestDebug]
    admitted: list[RequestDebug]
    holders: list[Holder]
    runs: list[CachedRun]
    whole_tree: bool


def take_glance(life: Lifecycle, most_requests: int, most_runs: int) -> Glance:
    """A record of this moment. Looks at LOOKS_PER_RUN nodes of the cache for each run asked for."""

    def records(requests: Iterable[Request]) -> list[RequestDebug]:
        return [debug_record(request, life) for request in islice(requests, most_requests)]

    admitted = life.admitted
    runs, whole = _largest_runs(life.memory.cache.tree, most_runs, LOOKS_PER_RUN * most_runs)
    return Glance(
        waiting=records(life.queue),
        compiling=records(life.compiling.values()),
        admitted=records(admitted),
        holders=[_holder(request) for request in admitted],
        runs=runs,
        whole_tree=whole,
    )


def _holder(request: Request) -> Holder:
    left = max(request.scheduling.target - request.length, 0)
    return Holder(left, request.launched_tokens, request.max_new_tokens, request.length)


def _largest_runs(tree: RadixTree, count: int, looks: int) -> tuple[list[CachedRun], bool]:
    """The largest nodes among the first `looks` that are met from the roots down, and whether
    there were no more."""
    level: list[Node] = list(islice(tree.roots.values(), looks))
    whole = len(level) == len(tree.roots)
    seen: list[Node] = []
    while level:
        room = looks - len(seen)
        children = (child for node in level for child in node.children.values())
        met = list(islice(children, room + 1))
        whole &= len(met) <= room
        level = met[:room]
        seen += level
    largest = nlargest(count, seen, key=lambda node: node.end - node.start)
    return [
        CachedRun(node.start, node.end, node.locks, node.hits, len(node.children))
        for node in largest
    ], whole
