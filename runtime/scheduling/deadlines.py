"""Deadlines: whose time is up, without looking at those whose time is not."""

from __future__ import annotations

import heapq
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from runtime.request import RequestState
from runtime.scheduling.request_record import record_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runtime.request import Request


class Limit(Enum):
    """What a deadline bounds."""

    TOTAL = "total"
    WAITING = "waiting"
    RUNNING = "running"


class Expired(NamedTuple):
    request: Request
    limit: Limit
    since_s: float


class Deadlines:
    """A heap of times. An entry whose request has moved on meanwhile is found stale when its time
    comes, so nothing is ever removed from the middle."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Expired]] = []
        self._count = 0

    def watch(self, request: Request, limit: Limit, since_s: float, until_s: float) -> None:
        """Calls for an end at `until_s` unless the request has ended, or has left the wait or run
        that began at `since_s`."""
        self._count += 1
        heapq.heappush(self._heap, (until_s, self._count, Expired(request, limit, since_s)))

    def expired(self, now: float) -> Iterator[Expired]:
        """Takes out those whose time has come, one by one: the end of a request makes its other
        deadlines void."""
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)[2]
            if _applies(entry):
                yield entry


def _applies(entry: Expired) -> bool:
    request, record = entry.request, record_of(entry.request)
    if request.finish is not None or record.ending is not None:
        return False
    if entry.limit is Limit.WAITING:
        waiting = request.state is RequestState.WAITING
        return waiting and record.waiting_since_s == entry.since_s
    if entry.limit is Limit.RUNNING:
        return record.started_s == entry.since_s
    return True
