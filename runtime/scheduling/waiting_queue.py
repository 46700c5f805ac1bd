"""The waiting requests, and the order in which the next pass looks at them."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right, insort
from itertools import chain, islice
from typing import TYPE_CHECKING

from runtime.scheduling.policies import POLICIES, SORT_WINDOW
from runtime.scheduling.radix_tree import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from runtime.config import SchedulerConfig
    from runtime.request import Request
    from runtime.scheduling.kv_memory import KVMemory

Entry = tuple[int, int, "Request"]  # (-priority, order of arrival, request)

# Visits to the cache in which a pass learns how much of the waiting prompts is cached: a quarter to
# half a millisecond. What is known of a prompt stays known, so that only what is new is to be found
# out; a burst of prompts with tens of thousands of cached tokens each takes some passes.
MATCH_VISITS = 256


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
        """Up to `count` requests to displace when the queue is at its cap: of the lowest priorities
        below this one, the newest that have no output token yet. A request that is about to end
        anyway makes no room and is passed by."""
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


class QueueOrder:
    """One policy over one queue: in which order a pass looks at the waiting requests.

    Larger priorities always come first; a policy orders requests of one priority. What needs a key
    per request looks at a window of the oldest only, so that a pass costs the same at 10,000
    waiting; and of what a policy has to know of the cache, a pass finds out a bounded part. A
    request of the window that has been passed over for too long comes first (`max_queue_skip_ms`):
    otherwise a prompt with nothing cached would wait as long as better ones keep arriving.

    Args:
        config: the policy, its seed, and the age bound.
    """

    def __init__(self, config: SchedulerConfig, queue: WaitingQueue, memory: KVMemory) -> None:
        self._queue = queue
        self._memory = memory
        self._random = random.Random(config.policy_seed)
        self._skip_s = config.max_queue_skip_ms / 1000
        self._policy = POLICIES[config.schedule_policy]
        if self._policy.cache_aware and not memory.cache_enabled:
            self._policy = POLICIES["fcfs"]

    def candidates(self, now: float, computed_tokens: int) -> Iterable[Request]:
        """Waiting requests, the next to admit first. Valid while the queue does not change.

        Args:
            computed_tokens: tokens the server has computed since start (hrrn's clock).
        """
        policy = self._policy
        if policy.shuffled:
            return self._shuffled()
        most = policy.most_waiting
        if policy.keys is None or (most is not None and len(self._queue) > most):
            return self._queue
        window = self._window()
        requests = [entry[2] for entry in window]
        if policy.needs_matches:
            self._look_up(requests)
        keys = policy.keys(requests, computed_tokens)
        order: list[tuple[int, bool, float, int, Request]] = []
        for (level, seq, request), key in zip(window, keys, strict=True):
            since = request.scheduling.passed_over_s
            in_turn = since is None or now - since <= self._skip_s
            order.append((level, in_turn, key if in_turn else 0.0, seq, request))
        order.sort()
        rest = islice(self._queue.entries, len(window), None)
        return chain((item[-1] for item in order), (entry[2] for entry in rest))

    def shortest(self, now: float, most_tokens: int) -> list[Request]:
        """Requests of the highest priority that have at most so many tokens to compute, the fewest
        first; before them, those that shorter ones have passed over for too long.

        How much of each is cached is taken as last looked up, which is enough for an order.
        """
        found: list[tuple[bool, int, int, Request]] = []
        window = self._queue.entries[:SORT_WINDOW]
        for level, seq, request in window:
            if level != window[0][0]:
                break
            record = request.scheduling
            tokens = len(record.key) // TOKEN_BYTES - record.place.tokens
            if tokens <= most_tokens:
                since = record.passed_over_s
                in_turn = since is None or now - since <= self._skip_s
                found.append((in_turn, tokens, seq, request))
        found.sort()
        return [item[-1] for item in found]

    def note_admitted(self, admitted: Sequence[Request], now: float) -> None:
        """Marks the requests that were passed over, after the admitted have left the queue."""
        if self._policy.keys is None or not admitted:
            return
        newest: dict[int, int] = {}
        for request in admitted:
            seq = request.scheduling.seq
            newest[-request.priority] = max(seq, newest.get(-request.priority, -1))
        for level, seq, request in self._window():
            record = request.scheduling
            if record.passed_over_s is None and seq < newest.get(level, -1):
                record.passed_over_s = now

    def note_passed_over(
        self, shortest: Sequence[Request], admitted: Sequence[Request], now: float
    ) -> None:
        """Marks those of the `shortest` that a later arrival was admitted ahead of."""
        newest = max([request.scheduling.seq for request in admitted], default=-1)
        for request in shortest:
            record = request.scheduling
            if record.passed_over_s is None and record.seq < newest and request not in admitted:
                record.passed_over_s = now

    def _window(self) -> list[Entry]:
        return self._queue.entries[: self._policy.window]

    def _look_up(self, requests: Sequence[Request]) -> None:
        left = MATCH_VISITS
        for request in requests:
            left -= self._memory.look_up(request, left)

    def _shuffled(self) -> Iterator[Request]:
        """A random permutation of each priority's requests, drawn as far as it is looked at."""
        entries = self._queue.entries
        first = 0
        while first < len(entries):
            last = self._queue.end_of_priority(first)
            moved: dict[int, int] = {}
            for at in range(first, last):
                pick = self._random.randrange(at, last)
                yield entries[moved.get(pick, pick)][2]
                moved[pick] = moved.get(at, at)
            first = last
