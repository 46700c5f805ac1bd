"""Lifecycle: where every live request is, and the moves between those places.

    add -> compiling (its grammar) -> queue -> chunked -> running -> ended -> leaving -> gone
                                        ^---------- retracted -----'

A request is in one place of compiling, queue, chunked and running, or in none of them while its
last token is in flight. An ended one that a launched step still names is leaving: it keeps row,
pages and lock until that step is committed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.request import FinishReason, RequestState
from runtime.scheduling.deadlines import Deadlines, Limit
from runtime.scheduling.wait_clocks import Reason, WaitClocks
from runtime.scheduling.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runtime.config import SchedulerConfig
    from runtime.request import Finish, Request
    from runtime.scheduling.deadlines import Expired
    from runtime.scheduling.kv_memory import KVMemory
    from runtime.scheduling.schedule_batch import ScheduleBatch
    from runtime.scheduling.statistics import Counters

_KEEPS_KV = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class InFlight:
    """A launched step, and the ended requests that are released when it is committed."""

    batch: ScheduleBatch
    leaving: list[Request] = field(default_factory=list)


class Lifecycle:
    """All live requests.

    Args:
        config: time-outs of waiting and of running requests.
        memory: what requests give back when they leave.
        counters: totals of ends.
    """

    def __init__(self, config: SchedulerConfig, memory: KVMemory, counters: Counters) -> None:
        self._config = config
        self.memory = memory
        self.counters = counters
        self.live: dict[str, Request] = {}  # every request that has not ended
        self.compiling: dict[str, Request] = {}
        self.queue = WaitingQueue()
        self.chunked: Request | None = None
        self.running: list[Request] = []  # get a decode row in the next step that carries any
        self.inflight: deque[InFlight] = deque()
        self.clocks = WaitClocks()
        self.mean_wait_s = 0.0  # of recent admissions
        self._endings: list[tuple[Request, bool]] = []  # and whether an output tells of it
        self._deadlines = Deadlines()
        self._ended_by_length: dict[str, Request] = {}

    def configure(self, config: SchedulerConfig) -> None:
        """Takes new options; waits and runs that have begun keep their time-outs."""
        self._config = config

    # In

    def add(self, request: Request, now: float) -> None:
        """A new request, its record made."""
        self.live[request.request_id] = request
        if request.deadline_s is not None:
            self._watch(request, Limit.TOTAL, request.arrival_s, request.deadline_s)
        self._begin_wait(request, now)
        if request.grammar is not None and not request.grammar.ready:
            self.compiling[request.request_id] = request
        else:
            self._enqueue(request, now)

    def _begin_wait(self, request: Request, now: float) -> None:
        request.scheduling.waiting_since_s = now
        limit_s = self._config.waiting_timeout_s
        if limit_s > 0:
            self._watch(request, Limit.WAITING, now, now + limit_s)

    def take_ready_grammars(self, now: float) -> list[str]:
        """Moves requests whose grammar is compiled into the queue; returns their ids."""
        ready = [r for r in self.compiling.values() if r.grammar is not None and r.grammar.ready]
        for request in ready:
            del self.compiling[request.request_id]
            waited = now - request.scheduling.waiting_since_s
            self.clocks.add(request, Reason.GRAMMAR, waited)
            self._enqueue(request, now)
        return [request.request_id for request in ready]

    def _enqueue(self, request: Request, now: float) -> None:
        request.state = RequestState.WAITING
        self.clocks.begin(request, now)
        self.queue.add(request)

    # On

    def admitted(self, request: Request, cached_tokens: int, now: float) -> None:
        """A request has left the queue for its first chunk, with this much of it cached."""
        record = request.scheduling
        self.queue.remove(request)
        self.clocks.end(request)
        record.started_s = now
        record.passed_over_s = None
        limit_s = self._config.running_timeout_s
        if limit_s > 0:
            self._watch(request, Limit.RUNNING, now, now + limit_s)
        self.mean_wait_s += 0.2 * (now - record.waiting_since_s - self.mean_wait_s)
        self.counters.admitted += 1
        if not record.counted:
            record.counted = True
            request.cached_tokens = cached_tokens
            self.counters.cached_tokens += cached_tokens
            self.counters.prompt_tokens += len(request.input_ids)

    def retract(self, request: Request, now: float) -> None:
        """Back into the queue with its outputs; its KV stays only as long as the cache keeps it.
        No launched step may name it."""
        record = request.scheduling
        if request is self.chunked:
            self.chunked = None
        else:
            self.running.remove(request)
        self.memory.release(request, request.length)
        request.length = 0
        request.launched_tokens = len(request.output_ids)
        request.retractions += 1
        record.key = request.tokens_to_prefill().tobytes()
        record.started_s = None
        self._begin_wait(request, now)
        if request.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        self._enqueue(request, now)

    def _watch(self, request: Request, limit: Limit, since_s: float, until_s: float) -> None:
        self._deadlines.watch(request, limit, since_s, until_s, self.live)

    # Out

    def expired(self, now: float) -> Iterator[Expired]:
        """Live requests whose time is up; each is to be ended before the next is asked for."""
        return self._deadlines.expired(now, self.live)

    def record_ending(self, request_id: str, finish: Finish, *, announced: bool) -> bool:
        """Marks a live request as about to end: its later tokens are dropped, and the next pass
        ends it. False where it is unknown, has ended, or is marked already.

        Args:
            announced: that pass gives an output of it.
        """
        request = self.live.get(request_id)
        if request is None or request.ending is not None:
            return False
        request.ending = finish
        self._endings.append((request, announced))
        return True

    def take_endings(self) -> list[tuple[Request, Finish, bool]]:
        """The endings recorded since the last call, of requests that have not ended otherwise
        meanwhile: (request, how it ends, whether an output tells of it)."""
        endings, self._endings = self._endings, []
        return [
            (request, finish, announced)
            for request, announced in endings
            if request.finish is None and (finish := request.ending) is not None
        ]

    @property
    def waiting_on(self) -> int:
        """Requests that wait, in the queue or for their grammar, and are not about to end."""
        leaving = sum(
            request.finish is None and request.state is RequestState.WAITING
            for request, _ in self._endings
        )
        return len(self.queue) + len(self.compiling) - leaving

    def override_length(self, request_id: str, finish: Finish) -> bool:
        """Replaces the end of a request that has just ended by length."""
        request = self._ended_by_length.pop(request_id, None)
        if request is None:
            return False
        self._count(FinishReason.LENGTH, -1)
        self._count(finish.reason, 1)
        request.finish = finish
        return True

    def forget_overridable(self) -> None:
        """The next pass has begun: ends by length are final."""
        self._ended_by_length.clear()

    def end(self, request: Request, finish: Finish) -> None:
        """Ends a live request wherever it is."""
        request_id = request.request_id
        record = request.scheduling
        del self.live[request_id]
        waiting = request.state is RequestState.WAITING
        if self.compiling.pop(request_id, None) is None and waiting:
            self.queue.remove(request)
            self.clocks.end(request)
        if request is self.chunked:
            self.chunked = None
        request.finish = finish
        request.state = RequestState.FINISHED
        self._count(finish.reason, 1)
        if finish.reason is FinishReason.LENGTH:
            self._ended_by_length[request_id] = request
        for flight in self.inflight:
            if flight.batch.step == record.last_step:
                flight.leaving.append(request)
                return
        self.release(request)

    def release(self, request: Request) -> None:
        """Takes row and KV from an ended request that no launched step names."""
        keep = 0
        if request.finish is not None and request.finish.reason in _KEEPS_KV:
            # The newest token has no KV, or some that a step wrote whose result was dropped.
            keep = len(request.input_ids) + len(request.output_ids) - 1
        self.memory.release(request, keep)

    def drop_ended(self) -> None:
        """Takes the requests that have ended out of the running list."""
        self.running = [request for request in self.running if request.finish is None]

    def _count(self, reason: FinishReason, count: int) -> None:
        finished = self.counters.finished
        finished[reason.value] = finished.get(reason.value, 0) + count
