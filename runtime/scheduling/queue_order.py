"""QueueOrder: in which order a pass looks at the waiting requests.

Larger priorities always come first; a policy orders requests of one priority. What needs a key per
request looks at a window of the oldest only, so that a pass costs the same at 10,000 waiting. A
request of the window that has been passed over for too long comes first (`max_queue_skip_ms`):
otherwise a prompt with nothing cached would wait as long as better ones keep arriving.
"""

from __future__ import annotations

import random
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from runtime.config import SchedulerConfig
    from runtime.request import Request
    from runtime.scheduling.kv_memory import KVMemory
    from runtime.scheduling.radix_cache import Node
    from runtime.scheduling.waiting_queue import Entry, WaitingQueue

TREE_WINDOW = 128  # requests that are matched against the cache in one pass
SORT_WINDOW = 512
_CACHE_AWARE = ("lpm", "dfs-weight")
_MATCHES_WINDOW = (*_CACHE_AWARE, "hrrn")


class QueueOrder:
    """One policy over one queue.

    Args:
        config: the policy, its seed, and the age bound.
    """

    def __init__(self, config: SchedulerConfig, queue: WaitingQueue, memory: KVMemory) -> None:
        self._queue = queue
        self._memory = memory
        self._random = random.Random(config.policy_seed)
        self._policy = config.schedule_policy
        self._skip_s = config.max_queue_skip_ms / 1000
        if self._policy in _CACHE_AWARE and not memory.cache_enabled:
            self._policy = "fcfs"

    def candidates(self, now: float, computed_tokens: int) -> Iterable[Request]:
        """Waiting requests, the next to admit first. Valid while the queue does not change.

        Args:
            computed_tokens: tokens the server has computed since start (hrrn's clock).
        """
        if self._policy == "random":
            return self._shuffled()
        key = self._sort_key(computed_tokens)
        if key is None:
            return self._queue
        window = sorted(
            self._window(),
            key=lambda entry: (entry[0], *self._aged_key(entry, key, now), entry[1]),
        )
        rest = self._queue.entries[len(window) :]
        return (entry[2] for entry in chain(window, rest))

    def note_admitted(self, admitted: Sequence[Request], now: float) -> None:
        """Remembers who was passed over, the admitted having left the queue."""
        if self._policy in ("fcfs", "random") or not admitted:
            return
        newest: dict[int, int] = {}
        for request in admitted:
            seq = request.scheduling.seq
            newest[-request.priority] = max(seq, newest.get(-request.priority, -1))
        for level, seq, request in self._window():
            record = request.scheduling
            if record.passed_over_s is None and seq < newest.get(level, -1):
                record.passed_over_s = now

    def _window(self) -> list[Entry]:
        size = TREE_WINDOW if self._policy in _MATCHES_WINDOW else SORT_WINDOW
        return self._queue.entries[:size]

    def _aged_key(
        self, entry: Entry, key: Callable[[Request], float], now: float
    ) -> tuple[bool, float]:
        since = entry[2].scheduling.passed_over_s
        if since is not None and now - since > self._skip_s:
            return False, 0.0
        return True, key(entry[2])

    def _sort_key(self, computed_tokens: int) -> Callable[[Request], float] | None:
        """What the policy sorts by, smallest first; None: arrival."""
        policy = self._policy
        if policy == "lpm" and len(self._queue) <= TREE_WINDOW:
            return lambda request: -self._memory.match_length(request)
        if policy == "lof":
            return lambda request: -request.max_new_tokens
        if policy == "hrrn":
            return lambda request: (
                -_response_ratio(request, computed_tokens, self._memory.match_length(request))
            )
        if policy == "dfs-weight":
            visits = self._depth_first([entry[2] for entry in self._window()])
            return lambda request: visits[request.request_id]
        return None

    def _depth_first(self, requests: Sequence[Request]) -> dict[str, int]:
        """Request id to its turn in a walk over the cached tree, at each node into the child with
        the most waiting requests below it first. What matches nothing comes last."""
        root: Node | None = None
        children: dict[Node | None, list[Node]] = {}
        weight: dict[Node, int] = {}
        at_node: dict[Node | None, list[Request]] = {}
        for request in requests:
            above = root
            for node in self._memory.match_path(request):
                if node not in weight:
                    weight[node] = 0
                    children.setdefault(above, []).append(node)
                weight[node] += 1
                above = node
            at_node.setdefault(above, []).append(request)
        visits: dict[str, int] = {}
        stack: list[tuple[Node | None, bool]] = [(root, False)]
        while stack:
            place, below_done = stack.pop()
            if below_done:
                for request in at_node.get(place, ()):
                    visits[request.request_id] = len(visits)
                continue
            stack.append((place, True))
            heaviest_first = sorted(children.get(place, ()), key=lambda node: -weight[node])
            stack.extend((child, False) for child in reversed(heaviest_first))
        return visits

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


def _response_ratio(request: Request, computed_tokens: int, cached: int) -> float:
    # Service is what is still to compute: on prompts with shared prefixes, counting the cached
    # part as well made hrrn no better than fcfs.
    record = request.scheduling
    to_prefill = len(request.input_ids) + len(request.output_ids) - cached
    service = to_prefill + request.remaining_tokens
    return 1.0 + (computed_tokens - record.arrival_tokens) / service
