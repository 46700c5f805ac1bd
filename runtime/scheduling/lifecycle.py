"""Lifecycle: where every live request is, and the moves between those places.

    add -> compiling (its grammar) -> queue -> chunked -> running -> ended -> leaving -> gone
                                        ^---------- retracted -----'

A request is in one place of compiling, queue, chunked and running, or in none of them while its
last token is in flight or its first step is tried again. An ended one that a launched step still
names is leaving: it keeps row, pages and lock until that step is committed. So does one that is
returning to the queue, since the KV it was built on has turned out to be wrong.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.errors import InvariantError
from runtime.request import FinishReason, RequestOutput, RequestState
from runtime.scheduling.accounting import BlockingTerm, Deadlines, Limit, WaitClocks
from runtime.scheduling.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from runtime.config import SchedulerConfig
    from runtime.request import Finish, Request
    from runtime.scheduling.accounting import Counters, Deadline
    from runtime.scheduling.kv_memory import KVMemory
    from runtime.scheduling.schedule_batch import Admitted, ScheduleBatch

_KEEPS_KV = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class InFlight:
    """A launched step, and what becomes of its requests when it is committed.

    Args:
        prefills: its prefill rows.
        running_before, chunked_before: the running list and the pending chunk before its launch.
        leaving: ended; released then. returning: back into the queue then.
    """

    batch: ScheduleBatch
    prefills: Sequence[Admitted]
    running_before: list[Request]
    chunked_before: Request | None
    leaving: list[Request] = field(default_factory=list)
    returning: list[Request] = field(default_factory=list)

    def gave_up(self, request: Request) -> bool:
        """Whether a request of it does not go on from here."""
        return request.finish is not None or request in self.returning


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
        self._watch_wait(request)

    def _watch_wait(self, request: Request) -> None:
        since_s, limit_s = request.scheduling.waiting_since_s, self._config.waiting_timeout_s
        if limit_s > 0:
            self._watch(request, Limit.WAITING, since_s, since_s + limit_s)

    def take_ready_grammars(self, now: float) -> list[str]:
        """Moves requests whose grammar is compiled into the queue; returns their ids."""
        ready = [r for r in self.compiling.values() if r.grammar is not None and r.grammar.ready]
        for request in ready:
            del self.compiling[request.request_id]
            waited = now - request.scheduling.waiting_since_s
            self.clocks.add(request, BlockingTerm.GRAMMAR, waited)
            self._enqueue(request, now)
        return [request.request_id for request in ready]

    def _enqueue(self, request: Request, now: float) -> None:
        request.state = RequestState.WAITING
        self.clocks.begin(request, now)
        self.queue.add(request)

    @property
    def admitted(self) -> list[Request]:
        """The running requests and the pending chunk: those that hold a row and KV."""
        return self.running if self.chunked is None else [*self.running, self.chunked]

    @property
    def holders(self) -> list[Request]:
        """Requests that may hold a row and KV: the live ones, and those that are leaving."""
        leaving = [request for flight in self.inflight for request in flight.leaving]
        return [*self.live.values(), *leaving]

    def admit(self, request: Request, cached_tokens: int, now: float) -> None:
        """A request has left the queue for its first chunk, with this much of it cached."""
        record = request.scheduling
        self.queue.remove(request)
        self.clocks.end(request)
        record.started_s = now
        limit_s = self._config.running_timeout_s
        if limit_s > 0:
            self._watch(request, Limit.RUNNING, now, now + limit_s)
        self.mean_wait_s += 0.2 * (now - record.waiting_since_s - self.mean_wait_s)
        self.counters.admitted += 1
        record.admissions += 1
        if record.admissions == 1:
            request.cached_tokens = cached_tokens
            self.counters.cached_tokens += cached_tokens
            self.counters.prompt_tokens += len(request.input_ids)

    def launched(self, batch: ScheduleBatch, prefills: Sequence[Admitted]) -> None:
        """A step will be launched. A request leaves the running list when the step holds its last
        token, and joins it when the step completes its prompt. A request whose prompt is still not
        complete becomes the pending chunk."""
        self.inflight.append(InFlight(batch, prefills, self.running, self.chunked))
        self.running = [r for r in self.running if r.launched_tokens < r.max_new_tokens]
        for item in prefills:
            if not item.last:
                self.chunked = item.request
                continue
            if item.request is self.chunked:
                self.chunked = None
            if item.request.remaining_tokens > 0:
                self.running.append(item.request)

    def retract(self, request: Request, now: float) -> None:
        """Back into the queue with its outputs; its KV stays only as long as the cache keeps it.
        No launched step may name it."""
        self._leave(request)
        self._return(request, request.length, now)

    def start_anew(self, requests: Sequence[Request], now: float) -> None:
        """Sends these requests, and those whose cached prefix has been dropped, back into the
        queue, as soon as no launched step names them."""
        for request in [r for r in self.live.values() if r.row >= 0]:
            if request not in requests and not self.memory.is_lost(request):
                continue
            flight = self._last_flight(request)
            if flight is None:
                self._leave(request)
                self._return(request, 0, now)
            elif request not in flight.returning:
                self._leave(request)
                flight.returning.append(request)

    def _leave(self, request: Request) -> None:
        if request is self.chunked:
            self.chunked = None
        elif request in self.running:
            self.running.remove(request)

    def _last_flight(self, request: Request) -> InFlight | None:
        """The last launched step that names it."""
        step = request.scheduling.last_step
        return next((flight for flight in self.inflight if flight.batch.step == step), None)

    def _return(self, request: Request, keep_tokens: int, now: float) -> None:
        self._give_back(request, keep_tokens)
        request.retractions += 1
        record = request.scheduling
        record.key = request.tokens_to_prefill().tobytes()
        record.passed_over_s = None
        self._begin_wait(request, now)
        if request.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        self._enqueue(request, now)

    def _give_back(self, request: Request, keep_tokens: int) -> None:
        self.memory.release(request, keep_tokens)
        request.length = 0
        request.launched_tokens = len(request.output_ids)
        request.scheduling.started_s = None

    def done(self, batch: ScheduleBatch) -> InFlight:
        """The oldest step in flight is done, and stands.

        Raises: InvariantError: it is another one.
        """
        flight = self._oldest(batch)
        self.inflight.popleft()
        self.memory.step_done(batch.step)
        return flight

    def _oldest(self, batch: ScheduleBatch) -> InFlight:
        if not self.inflight or self.inflight[0].batch is not batch:
            raise InvariantError(f"step {batch.step} is not the oldest step in flight")
        return self.inflight[0]

    def committed(self, flight: InFlight, now: float) -> None:
        """Releases what only a step that is done still named."""
        for request in flight.leaving:
            self.release(request)
        for request in flight.returning:
            if request.finish is None:
                self._return(request, 0, now)

    def take_back(self, batch: ScheduleBatch, now: float) -> list[InFlight]:
        """The oldest step in flight has failed: takes every launched step back, the newest first,
        as if none had been launched.

        A request that a later step admitted goes back to its place in the queue. A request that the
        oldest step admitted keeps its row and its cached prefix, and is in no list: it is tried
        again, or ends.

        Returns: those steps, the oldest first.
        Raises: InvariantError: another step is the oldest.
        """
        self._oldest(batch)
        flights = list(self.inflight)
        holders = {request.row: request for request in self.live.values() if request.row >= 0}
        for flight in reversed(flights):
            self.memory.take_back_insertions(flight.batch.step)
            self._take_back_table(flight.batch, holders)
            self._take_back_rows(flight)
            if flight is not flights[0]:
                self._let_go(flight, now)
        self.inflight.clear()
        for flight in flights:
            self.memory.step_done(flight.batch.step)
            self.committed(flight, now)
        return flights

    def _let_go(self, flight: InFlight, now: float) -> None:
        """Takes row, pages and lock from the requests that a later step admitted, since they have
        computed nothing; also from those that have ended since or are to return. This comes before
        the insertions of earlier steps are taken out of the cache, which they may read."""
        for item in flight.prefills:
            request = item.request
            if item.match is None:
                continue
            if request in flight.leaving:
                flight.leaving.remove(request)
                self.memory.release(request, 0)
            elif request in flight.returning:
                flight.returning.remove(request)
                self._return(request, 0, now)
            else:
                self._unadmit(item, now)

    def _take_back_table(self, batch: ScheduleBatch, holders: dict[int, Request]) -> None:
        """Marks the table entries that a step carried to be sent again. They may belong to requests
        that are not in that step."""
        for row, index in zip(batch.table_rows, batch.table_indices, strict=True):
            if row in holders:
                self.memory.out_of_date(holders[row], index)

    def _take_back_rows(self, flight: InFlight) -> None:
        batch = flight.batch
        for request, length in zip(batch.requests, batch.prefix_lens, strict=True):
            self.memory.shrink(request, length)
        for row, count in zip(batch.sampled, batch.output_counts, strict=True):
            batch.requests[row].launched_tokens = count
        for request in batch.requests[: batch.num_prefill]:
            if request.finish is None:
                request.state = RequestState.PREFILLING
        self.running = [r for r in flight.running_before if r.row >= 0 and not flight.gave_up(r)]
        chunked = flight.chunked_before
        if chunked is not None and (chunked.row < 0 or flight.gave_up(chunked)):
            chunked = None
        self.chunked = chunked

    def _unadmit(self, item: Admitted, now: float) -> None:
        """A request whose first step was never done waits again, as if it had not been admitted."""
        request, record = item.request, item.request.scheduling
        assert item.match is not None
        self._give_back(request, 0)
        self.counters.admitted -= 1
        if record.admissions == 1:
            self.counters.cached_tokens -= request.cached_tokens
            self.counters.prompt_tokens -= len(request.input_ids)
            request.cached_tokens = 0
        record.admissions -= 1
        self._watch_wait(request)
        self._enqueue(request, now)

    def _watch(self, request: Request, limit: Limit, since_s: float, until_s: float) -> None:
        self._deadlines.watch(request, limit, since_s, until_s, self.live)

    def expired(self, now: float) -> Iterator[tuple[Request, Deadline]]:
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

    def end(self, request: Request, finish: Finish) -> RequestOutput:
        """Ends a live request wherever it is; returns a last output of it, without tokens."""
        request_id = request.request_id
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
        flight = self._last_flight(request)
        if flight is None:
            self.release(request)
        else:
            flight.leaving.append(request)
        return RequestOutput(request, [], finish=finish)

    def release(self, request: Request) -> None:
        """Takes row and KV from an ended request that no launched step names."""
        keep = 0
        if request.finish is not None and request.finish.reason in _KEEPS_KV:
            # The newest token has no KV, or only that of a step with a dropped result.
            keep = len(request.input_ids) + len(request.output_ids) - 1
        self.memory.release(request, keep)

    def drop_ended(self) -> None:
        """Takes the requests that have ended out of the running list."""
        self.running = [request for request in self.running if request.finish is None]

    def _count(self, reason: FinishReason, count: int) -> None:
        finished = self.counters.finished
        finished[reason.value] = finished.get(reason.value, 0) + count
