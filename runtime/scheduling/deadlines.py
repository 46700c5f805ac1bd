"""Deadlines: whose time is up, without looking at those whose time is not."""

from __future__ import annotations

import heapq
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from runtime.request import RequestState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from runtime.request import Request


MIN_SWEEP = 1024


class Limit(Enum):
    """What a deadline bounds."""

    TOTAL = "total"
    WAITING = "waiting"
    RUNNING = "running"


class Expired(NamedTuple):
    """A live request whose time is up, counted from `since_s`."""

    request: Request
    limit: Limit
    since_s: float


class _Entry(NamedTuple):
    """Names its request instead of holding it: an answer long given must not stay in memory until
    its deadline."""

    until_s: float
    order: int
    request_id: str
    seq: int
    limit: Limit
    since_s: float


class Deadlines:
    """A heap of times. An entry whose request has moved on meanwhile is found stale when its time
    comes, or when stale ones have become the most."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._count = 0
        self._sweep_at = MIN_SWEEP

    def watch(
        self,
        request: Request,
        limit: Limit,
        since_s: float,
        until_s: float,
        live: Mapping[str, Request],
    ) -> None:
        """Calls for an end at `until_s` unless the request has ended, or has left the wait or run
        that began at `since_s`.

        Args:
            live: requests that have not ended, by id.
        """
        self._count += 1
        seq = request.scheduling.seq
        entry = _Entry(until_s, self._count, request.request_id, seq, limit, since_s)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > self._sweep_at:
            self._heap = [entry for entry in self._heap if _find(entry, live) is not None]
            heapq.heapify(self._heap)
            self._sweep_at = max(2 * len(self._heap), MIN_SWEEP)

    def expired(self, now: float, live: Mapping[str, Request]) -> Iterator[Expired]:
        """Takes out those whose time has come, one by one: the end of a request makes its other
        deadlines void."""
        while self._heap and self._heap[0].until_s <= now:
            entry = heapq.heappop(self._heap)
            request = _find(entry, live)
            if request is not None:
                yield Expired(request, entry.limit, entry.since_s)


def _find(entry: _Entry, live: Mapping[str, Request]) -> Request | None:
    """The entry's request, if it is still what the entry bounds."""
    request = live.get(entry.request_id)
    if request is None:
        return None
    record = request.scheduling
    if record.seq != entry.seq or request.ending is not None:
        return None
    if entry.limit is Limit.WAITING:
        waiting = request.state is RequestState.WAITING
        return request if waiting and record.waiting_since_s == entry.since_s else None
    if entry.limit is Limit.RUNNING:
        return request if record.started_s == entry.since_s else None
    return request
