"""WaitingQueue: who waits, and in which order the next pass looks at them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runtime.request import Request

Entry = tuple[int, int, "Request"]  # (-priority, order of arrival, request)


class WaitingQueue:
    """Waiting requests by priority, then arrival. A request that comes back after a retraction
    keeps its arrival, so it stands before all that arrived after it.

    Adding and removing move pointers only: about 10 us in a queue of 10,000.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self.entries)

    def add(self, request: Request) -> None:
        insort(self.entries, _entry(request))

    def remove(self, request: Request) -> None:
        """Takes out a waiting request."""
        entry = _entry(request)
        at = bisect_left(self.entries, entry)
        assert self.entries[at][2] is request
        del self.entries[at]

    def highest_priority(self) -> int:
        """Priority of those that come first. The queue is not empty."""
        return -self.entries[0][0]

    def end_of_priority(self, first: int) -> int:
        """Index behind the last entry that has the priority of entry `first`."""
        return bisect_right(self.entries, self.entries[first][0], key=_level)

    def to_displace(self, priority: int, count: int) -> list[Request]:
        """Up to `count` requests that make room when the queue is at its cap: of the lowest
        priorities below this one, the newest that have not been given any token yet. One that is
        about to end by itself makes no room."""
        found: list[Request] = []
        for level, _, request in reversed(self.entries):
            if len(found) >= count or -level >= priority:
                break
            if not request.output_ids and request.ending is None:
                found.append(request)
        return found


def _level(entry: Entry) -> int:
    return entry[0]


def _entry(request: Request) -> Entry:
    return -request.priority, request.scheduling.seq, request
