"""Scheduler: what every step computes, decided in pure Python over ints.

No torch, no clock, no randomness of its own, no I/O: the same calls with the same arguments lead to
the same decisions, so a run can be recorded, replayed and simulated. The loop around it is

    plan N + 1  (result N not yet applied)  ->  launch N + 1  ->  wait for N  ->  commit N

A launched step counts as done for planning (lengths and output counts count launched tokens), but
what it names, rows and KV pages, is given back only when it is committed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.errors import InvalidRequest, InvariantError
from runtime.request import Finish, FinishReason, RequestOutput, RequestState
from runtime.scheduling.admission import Admission
from runtime.scheduling.batch_builder import build_batch
from runtime.scheduling.decode_memory import DecodeMemory
from runtime.scheduling.intake import resolve_max_new_tokens
from runtime.scheduling.invariants import check_books
from runtime.scheduling.kv_memory import KVMemory
from runtime.scheduling.new_token_ratio import NewTokenRatio
from runtime.scheduling.radix_cache import is_dead
from runtime.scheduling.request_record import (
    RequestRecord,
    record_of,
    remaining_tokens,
    tokens_to_prefill,
)
from runtime.scheduling.statistics import Counters, RequestDebug, SchedulerStatistics
from runtime.scheduling.step_results import apply_results
from runtime.scheduling.wait_clocks import Reason, WaitClocks
from runtime.scheduling.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from runtime.config import SchedulerConfig
    from runtime.request import Request
    from runtime.runner import StepOutput
    from runtime.scheduling.schedule_batch import ScheduleBatch

MAX_IN_FLIGHT = 2
_KEEPS_KV = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class Plan:
    """What a pass decided.

    Args:
        batch: the step to launch, to be committed or failed later; None: nothing to launch.
        reason: without a batch: "idle", "wait_commit" (commit the step in flight, then plan
            again), or the term that blocks the queue.
        ended: requests that ended in this pass (aborted, timed out, impossible to continue).
        grammars_ready: ids of requests that entered the queue since their grammar is compiled.
    """

    batch: ScheduleBatch | None = None
    reason: str = ""
    ended: list[RequestOutput] = field(default_factory=list)
    grammars_ready: list[str] = field(default_factory=list)


@dataclass(slots=True)
class InFlight:
    """A launched step, and the ended requests that are released when it is committed."""

    batch: ScheduleBatch
    leaving: list[Request] = field(default_factory=list)


class Scheduler:
    """Continuous batching over one KV pool. Not thread-safe: one caller at a time.

    Args:
        config: capacity, limits and options.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.memory = KVMemory(config)
        self.counters = Counters()
        self._queue = WaitingQueue()
        self._clocks = WaitClocks()
        self._ratio = NewTokenRatio(config.schedule_conservativeness)
        self._decode_memory = DecodeMemory(self.memory)
        self._admission = Admission(config, self.memory, self._queue, self._clocks)
        self._requests: dict[str, Request] = {}  # all that have not ended
        self._compiling: dict[str, Request] = {}  # of those, the ones whose grammar is not ready
        self._running: list[Request] = []  # get a decode row in the next step that carries any
        self._chunked: Request | None = None
        self._inflight: deque[InFlight] = deque()
        self._endings: list[Request] = []
        self._ended_by_length: dict[str, Request] = {}
        self._next_seq = 0
        self._next_step = 0
        self._idle_checked = True
        self._invariant_error: str | None = None

    # Requests

    def add(self, request: Request, now: float) -> list[RequestOutput]:
        """Takes a request into the queue.

        Returns: outputs of waiting requests that had to make room for it.
        Raises: InvalidRequest, ContextTooLong, QueueFull; the request is then not taken.
        """
        config = self.config
        if request.request_id in self._requests:
            raise InvalidRequest(f"Request id {request.request_id!r} is in use.")
        request.max_new_tokens = resolve_max_new_tokens(
            request,
            context_length=config.context_length,
            usable_tokens=self.memory.capacity_tokens,
            page_size=config.page_size,
        )
        sampling = request.sampling
        eos = frozenset() if sampling.ignore_eos else config.eos_token_ids
        record = RequestRecord(
            seq=self._next_seq,
            stop_ids=sampling.stop_token_ids | eos,
            key=request.input_ids.tobytes(),
            enqueued_s=now,
            arrival_tokens=self.counters.computed_tokens,
        )
        if sampling.prompt_logprobs is not None:
            record.prompt_logprobs = [None]
        request.scheduling = record
        self._next_seq += 1
        self._requests[request.request_id] = request
        if request.grammar is not None and not request.grammar.ready:
            self._compiling[request.request_id] = request
        else:
            self._enqueue(request, now)
        return []

    def abort(self, request_id: str, message: str | None = None) -> bool:
        """Records that a request is to end; the next plan ends it and gives its last output.

        Tokens of it that arrive meanwhile are dropped. Returns False for a request that is
        unknown, has ended, or is already about to.
        """
        return self._record_ending(request_id, Finish(FinishReason.ABORT, message=message))

    def abort_all(self, message: str | None = None) -> int:
        """Aborts every request; returns how many."""
        return sum([self.abort(request_id, message) for request_id in list(self._requests)])

    def finish(self, request_id: str, finish: Finish) -> bool:
        """Records an end that the text made (a stop string); the next plan applies it without an
        output, since the caller knows. Its KV stays in the cache as after any finish.

        A stop text that completes on the last allowed token overrides the `length` by which the
        request has just ended. Returns False for a request that is unknown or has ended otherwise.
        """
        request = self._ended_by_length.pop(request_id, None)
        if request is None:
            return self._record_ending(request_id, finish)
        self._count_finish(FinishReason.LENGTH, -1)
        self._count_finish(finish.reason, 1)
        request.finish = finish
        return True

    def _record_ending(self, request_id: str, finish: Finish) -> bool:
        request = self._requests.get(request_id)
        if request is None or record_of(request).ending is not None:
            return False
        record_of(request).ending = finish
        self._endings.append(request)
        return True

    def _enqueue(self, request: Request, now: float) -> None:
        request.state = RequestState.WAITING
        self._clocks.begin(request, now)
        self._queue.add(request)

    @property
    def has_unfinished(self) -> bool:
        """Whether anything waits, runs or is in flight."""
        return bool(self._requests or self._inflight)

    # One pass

    def plan(self, now: float) -> Plan:
        """Decides the next step. A batch that is returned will be launched, and later committed
        or failed, in order."""
        self._clocks.new_pass(now)
        plan = Plan()
        self._ended_by_length.clear()
        self._apply_endings(plan)
        self._take_ready_grammars(plan, now)
        if len(self._inflight) >= MAX_IN_FLIGHT:
            plan.reason = "wait_commit"
            return plan
        self._running = [request for request in self._running if request.finish is None]
        if self._chunked is not None:
            self.memory.share(self._chunked, self._chunked.length)
        self._decide(plan, now)
        if plan.batch is not None:
            self._idle_checked = False
        elif not plan.reason:
            self._nothing_to_launch(plan)
        return plan

    def _decide(self, plan: Plan, now: float) -> None:
        mixing = not self.config.disable_mixed_chunk
        retracted = False
        if mixing:
            if not self._fits_or_may_retract(plan):
                return
            retracted = self._make_room(plan, now)
        admitted, chunked = self._admission.build(
            now, self._running, self._chunked, self._ratio.value, retracted=retracted
        )
        self._chunked = chunked
        decoding = self._running if mixing or not admitted else []
        if decoding and not mixing:
            if not self._fits_or_may_retract(plan):
                return
            retracted = self._make_room(plan, now)
            decoding = self._running
        if not admitted and not decoding:
            return
        batch = build_batch(self._next_step, admitted, decoding, self.memory)
        self._launched(batch, [item.request for item in admitted if item.last], now)
        if decoding and not retracted:
            self._ratio.decay()
        plan.batch = batch

    def _launched(self, batch: ScheduleBatch, completed: list[Request], now: float) -> None:
        """Books a step that will be launched: whose prompt is complete joins the running list,
        whose last token is in this step leaves it."""
        self._next_step += 1
        self._inflight.append(InFlight(batch))
        counters = self.counters
        counters.steps += 1
        counters.computed_tokens += batch.prefill_tokens + batch.num_decode
        if batch.num_decode:
            self._running = [r for r in self._running if r.launched_tokens < r.max_new_tokens]
        for request in batch.requests[: batch.num_prefill]:
            self._count_admission(request, now)
        self._running.extend(r for r in completed if remaining_tokens(r) > 0)

    def _count_admission(self, request: Request, now: float) -> None:
        record = record_of(request)
        self.counters.chunks += 1
        if record.started_s is not None:
            return
        record.started_s = now
        self.counters.admitted += 1
        if not record.first_admitted:
            record.first_admitted = True
            request.cached_tokens = record.tree_tokens
            self.counters.cached_tokens += request.cached_tokens
            self.counters.prompt_tokens += len(request.input_ids)

    def _nothing_to_launch(self, plan: Plan) -> None:
        if self._inflight:
            plan.reason = "wait_commit"
        elif self._queue or self._chunked is not None:
            plan.reason = self._admission.reason.value
        elif self._compiling:
            plan.reason = Reason.GRAMMAR.value
        else:
            plan.reason = "idle"
            self._ratio.reset()
            self._check_when_idle()

    def _check_when_idle(self) -> None:
        # A wrong book is reported, and does not end a server that can go on.
        if self._idle_checked:
            return
        self._idle_checked = True
        try:
            self.check()
        except InvariantError as error:
            self._invariant_error = str(error)

    def _take_ready_grammars(self, plan: Plan, now: float) -> None:
        for request in [r for r in self._compiling.values() if r.grammar and r.grammar.ready]:
            del self._compiling[request.request_id]
            self._clocks.add(request, Reason.GRAMMAR, now - record_of(request).enqueued_s)
            plan.grammars_ready.append(request.request_id)
            self._enqueue(request, now)

    # Memory for decoding

    def _fits_or_may_retract(self, plan: Plan) -> bool:
        """False, with the reason wait_commit, where rows must be retracted but a step in flight
        still names their slots and their newest tokens are not known."""
        if not self._inflight or self._decode_memory.fits(self._running):
            return True
        plan.reason = "wait_commit"
        return False

    def _make_room(self, plan: Plan, now: float) -> bool:
        """Retracts until the running rows' next step fits; returns whether it had to."""
        if self._decode_memory.fits(self._running):
            return False
        victims, hopeless = self._decode_memory.choose_victims(self._running, self._chunked)
        for request in victims:
            self._retract(request, now)
            self.counters.retractions += 1
        if hopeless is not None:
            message = (
                f"The KV cache of {self.memory.capacity_tokens} tokens has no page left for this"
                f" request alone, which holds {hopeless.length} tokens."
            )
            self._end(hopeless, Finish(FinishReason.ERROR, message=message))
            plan.ended.append(RequestOutput(hopeless, [], finish=hopeless.finish))
            self._running.remove(hopeless)
        self._ratio.after_retraction(self._running)
        return True

    def _retract(self, request: Request, now: float) -> None:
        """Back into the queue with its outputs; its KV stays only as long as the cache keeps it."""
        record = record_of(request)
        if request is self._chunked:
            self._chunked = None
        else:
            self._running.remove(request)
        self.memory.release(request, request.length)
        request.length = 0
        request.launched_tokens = len(request.output_ids)
        request.retractions += 1
        record.key = tokens_to_prefill(request).tobytes()
        record.started_s = None
        if record.prompt_logprobs is not None:
            record.prompt_logprobs = [None]
        self._enqueue(request, now)

    # Results

    def commit(self, batch: ScheduleBatch, output: StepOutput, now: float) -> list[RequestOutput]:
        """Applies a step's result. Steps are committed, or failed, in the order of their launch.

        Returns: news per request, in batch order, for those still alive.
        """
        flight = self._take_flight(batch)
        outputs = apply_results(batch, output)
        self.counters.output_tokens += len(outputs)
        for news in outputs:
            if news.finish is not None:
                self._end(news.request, news.finish)
        self._release_leaving(flight)
        return outputs

    def fail(self, batch: ScheduleBatch, message: str, now: float) -> list[RequestOutput]:
        """A step raised: its requests end with an error, what it put into the cache is dropped,
        and so end the requests of a later launched step that built on that."""
        flight = self._take_flight(batch)
        self.counters.failed_steps += 1
        self.memory.cache.drop_written_by(batch.step)
        later = [request for other in self._inflight for request in other.batch.requests]
        affected = [r for r in later if is_dead(record_of(r).node)]
        outputs = []
        finish = Finish(FinishReason.ERROR, message=message)
        for request in dict.fromkeys([*batch.requests, *affected]):
            if request.finish is None:
                self._end(request, finish)
                outputs.append(RequestOutput(request, [], finish=finish))
        self._release_leaving(flight)
        return outputs

    def _take_flight(self, batch: ScheduleBatch) -> InFlight:
        if not self._inflight or self._inflight[0].batch is not batch:
            raise InvariantError(f"step {batch.step} is not the oldest step in flight")
        flight = self._inflight.popleft()
        self.memory.allocator.step_done(batch.step)
        return flight

    def _release_leaving(self, flight: InFlight) -> None:
        for request in flight.leaving:
            self._release(request)

    # Endings

    def _apply_endings(self, plan: Plan) -> None:
        endings, self._endings = self._endings, []
        for request in endings:
            finish = record_of(request).ending
            if request.finish is not None or finish is None:
                continue
            self._end(request, finish)
            if finish.reason is not FinishReason.STOP:
                plan.ended.append(RequestOutput(request, [], finish=finish))

    def _end(self, request: Request, finish: Finish) -> None:
        """Ends a request wherever it is: compiling, waiting, cut, running, in flight."""
        request_id = request.request_id
        record = record_of(request)
        del self._requests[request_id]
        if self._compiling.pop(request_id, None) is None and request.state is RequestState.WAITING:
            self._queue.remove(request)
            self._clocks.end(request)
        if request is self._chunked:
            self._chunked = None
        request.finish = finish
        request.state = RequestState.FINISHED
        record.ending = None
        self._count_finish(finish.reason, 1)
        if finish.reason is FinishReason.LENGTH:
            self._ended_by_length[request_id] = request
        for flight in self._inflight:
            if flight.batch.step == record.last_step:
                flight.leaving.append(request)
                return
        self._release(request)

    def _release(self, request: Request) -> None:
        keep = 0
        if request.finish is not None and request.finish.reason in _KEEPS_KV:
            # The newest token's KV is written by the step that it is the input of: none, or one
            # whose result was dropped.
            keep = len(request.input_ids) + len(request.output_ids) - 1
        self.memory.release(request, keep)

    def _count_finish(self, reason: FinishReason, count: int) -> None:
        finished = self.counters.finished
        finished[reason.value] = finished.get(reason.value, 0) + count

    # Cache, statistics, self-check

    def flush(self) -> bool:
        """Empties the cache. Returns False while any request is alive or a step in flight."""
        if self.has_unfinished:
            return False
        self.memory.cache.flush()
        return True

    def statistics(self) -> SchedulerStatistics:
        """The scheduler at this moment."""
        memory, cache = self.memory, self.memory.cache
        size = memory.page_size
        cached = cache.evictable_tokens + cache.protected_tokens
        reserved = (1 + memory.allocator.deferred_pages) * size
        capacity = memory.allocator.num_pages * size
        admission = self._admission
        return SchedulerStatistics(
            running=len(self._running),
            prefilling=int(self._chunked is not None),
            waiting=len(self._queue),
            waiting_grammar=len(self._compiling),
            in_flight=len(self._inflight),
            capacity_tokens=capacity,
            free_tokens=memory.allocator.free_tokens,
            cached_tokens=cached,
            private_tokens=capacity - memory.allocator.free_tokens - cached - reserved,
            reserved_tokens=reserved,
            evictable_tokens=cache.evictable_tokens,
            protected_tokens=cache.protected_tokens,
            free_rows=memory.allocator.free_rows,
            full=admission.full,
            reason=admission.reason.value,
            new_token_ratio=self._ratio.value,
            chunk_tokens=max(self.config.chunked_prefill_size, 0),
            slo_feasible=None,
            predicted_step_s=None,
            invariant_error=self._invariant_error,
            wait_seconds=self._clocks.totals_by_reason(),
            counters=self.counters,
        )

    @property
    def requests(self) -> list[RequestDebug]:
        """A record of every live request, oldest first, with the time each has waited and for
        what."""
        return [self._debug(request) for request in self._requests.values()]

    def _debug(self, request: Request) -> RequestDebug:
        record = record_of(request)
        blocked = record.own_reason
        if request.request_id in self._compiling:
            blocked = Reason.GRAMMAR.value
        elif request.state is RequestState.WAITING and not blocked:
            blocked = self._clocks.current.value
        return RequestDebug(
            request_id=request.request_id,
            state=request.state.value,
            priority=request.priority,
            input_tokens=len(request.input_ids),
            output_tokens=len(request.output_ids),
            max_new_tokens=request.max_new_tokens,
            cached_tokens=request.cached_tokens,
            kv_tokens=request.length,
            retractions=request.retractions,
            blocked_by=blocked,
            waited_s=self._clocks.waited_seconds(request),
        )

    def waited_seconds(self, request: Request) -> dict[str, float]:
        """Seconds that a request, alive or ended, has waited per blocking term."""
        return self._clocks.waited_seconds(request)

    def check(self) -> None:
        """Recounts every book.

        Raises: InvariantError: naming the first that is wrong.
        """
        leaving = [r for flight in self._inflight for r in flight.leaving]
        check_books(
            self.memory,
            [*self._requests.values(), *leaving],
            [flight.batch for flight in self._inflight],
        )
