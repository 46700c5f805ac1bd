"""Scheduler: what every step computes, decided in pure Python over ints.

No torch, no clock, no randomness of its own, no I/O: the same calls with the same arguments lead to
the same decisions, so a run can be recorded, replayed and simulated. Everything that it is told
comes in through the methods below; readiness of grammars is looked at in `plan` alone. The loop
around it is

    plan N + 1  (result N not yet applied)  ->  launch N + 1  ->  wait for N  ->  commit N

A launched step counts as done for planning (lengths and output counts count launched tokens), but
what it names, rows and KV pages, is given back only when it is committed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from runtime.config import FIXED_OPTIONS
from runtime.errors import ConfigError, InvariantError
from runtime.request import Finish, FinishReason
from runtime.scheduling import intake, nan_recovery
from runtime.scheduling.accounting import BlockingTerm, Counters
from runtime.scheduling.admission import Admission
from runtime.scheduling.glance import take_glance
from runtime.scheduling.invariants import IdleRecount, check_books
from runtime.scheduling.kv_memory import KVMemory
from runtime.scheduling.lifecycle import Lifecycle
from runtime.scheduling.plan import Plan
from runtime.scheduling.retraction import NewTokenRatio, next_tokens_fit, retract_until_fit
from runtime.scheduling.schedule_batch import book_batch
from runtime.scheduling.statistics import debug_record, take_statistics
from runtime.scheduling.step_results import StepRetries, apply_results, keep_prompts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.config import SchedulerConfig
    from runtime.request import Request, RequestOutput
    from runtime.runner import StepOutput
    from runtime.scheduling.cache_events import CacheEvents
    from runtime.scheduling.glance import Glance
    from runtime.scheduling.kv_tier import KVTier, TierPrefix
    from runtime.scheduling.schedule_batch import Admitted, ScheduleBatch
    from runtime.scheduling.statistics import RequestDebug, SchedulerStatistics

MAX_IN_FLIGHT = 2
# A prompt is looked up in the cache when it arrives, for a millisecond at most, so that a pass has
# only to find out what has changed since.
ARRIVAL_VISITS = 1024


class Scheduler:
    """Continuous batching over one KV pool. Not thread-safe: one caller at a time.

    Args:
        config: capacity, limits and options.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._memory = KVMemory(config)
        self.counters = Counters()
        self._life = Lifecycle(config, self._memory, self.counters)
        self._admission = Admission(config, self._life)
        self._ratio = NewTokenRatio(config.schedule_conservativeness)
        self._retries = StepRetries()
        self._next_seq = 0
        self._next_step = 0
        self._recount = IdleRecount(self._memory)

    def add(self, request: Request, now: float) -> list[RequestOutput]:
        """Takes a request into the queue; a group of one.

        Returns, raises: as `add_group`.
        """
        return self.add_group([request], now)

    def add_group(self, requests: Sequence[Request], now: float) -> list[RequestOutput]:
        """Takes requests that one client waits for together into the queue: all of them, or none.

        Returns: the last outputs of waiting requests of lower priority that had to make room;
            nobody has to unless the whole group gets in.
        Raises: InvalidRequest, ContextTooLong, QueueFull; then none is taken.
        """
        config, life = self.config, self._life
        intake.check_ids(requests, life)
        limits = [intake.resolve_max_new_tokens(request, config) for request in requests]
        displaced = intake.make_room_in_queue(requests, life, config.max_queued_requests)
        computed = self.counters.computed_tokens
        for request, limit in zip(requests, limits, strict=True):
            request.max_new_tokens = limit
            intake.start_record(request, self._next_seq, computed, config)
            self._next_seq += 1
            life.add(request, now)
            self._memory.look_up(request, ARRIVAL_VISITS)
        self._recount.books_change()
        self.counters.displaced += len(displaced)
        return [life.end(*pair) for pair in displaced]

    def room_for_output(self, inputs: int) -> int:
        """Output tokens that a request with so many inputs may have; below 1: it cannot fit."""
        return intake.room_for_output(inputs, self.config)

    def abort(self, request_id: str, message: str | None = None) -> bool:
        """Records that a request is to end; the next plan ends it and gives its last output.

        Tokens of it that arrive meanwhile are dropped. Returns False for a request that is
        unknown, has ended, or is already about to.
        """
        finish = Finish(FinishReason.ABORT, message=message)
        return self._life.record_ending(request_id, finish, announced=True)

    def abort_all(self, message: str | None = None) -> int:
        """Aborts every request; returns how many."""
        finish, life = Finish(FinishReason.ABORT, message=message), self._life
        return sum([life.record_ending(name, finish, announced=True) for name in life.live])

    def finish(self, request_id: str, finish: Finish) -> bool:
        """Records an end that the text made (a stop string); the next plan applies it without an
        output, since the caller knows. Its KV stays in the cache as after any finish.

        A stop text that completes on the last allowed token overrides the `length` by which the
        request has just ended. Returns False for a request that is unknown, has ended otherwise, or
        is already about to.
        """
        if self._life.override_length(request_id, finish):
            return True
        return self._life.record_ending(request_id, finish, announced=False)

    @property
    def has_unfinished(self) -> bool:
        """Whether anything waits, runs or is in flight."""
        return bool(self._life.live or self._life.inflight)

    def plan(self, now: float) -> Plan:
        """Decides the next step. A batch that is returned will be launched, and later committed
        or failed, in order."""
        life = self._life
        plan = Plan()
        life.clocks.new_pass(now)
        self._memory.cache.pins.expire(now)
        life.forget_overridable()
        self._apply_ends(plan, now)
        plan.grammars_ready = life.take_ready_grammars(now)
        if len(life.inflight) >= MAX_IN_FLIGHT:
            plan.reason = "wait_commit"
            return plan
        life.drop_ended()
        if life.inflight and life.inflight[0].batch.retry:
            plan.reason = "wait_commit"
        elif (part := self._retries.take()) is not None:
            plan.batch = self._book(*part, retry=True)
        else:
            if life.chunked is not None:
                self._memory.insert(life.chunked, life.chunked.length)
            self._decide(plan, now)
        if plan.batch is None and not plan.reason:
            self._nothing_to_launch(plan)
        if self._memory.tier is not None:
            plan.loads = self._memory.tier.take_loads()
            plan.copies = self._memory.tier.write_behind.name_copies()
        return plan

    def _apply_ends(self, plan: Plan, now: float) -> None:
        """Recorded ones, then time-outs."""
        life = self._life
        for request, finish, announced in life.take_endings():
            news = life.end(request, finish)
            if announced:
                plan.ended.append(news)
        for request, deadline in life.expired(now):
            waited = f"({deadline.limit.value}) after {now - deadline.since_s:.3f} s"
            message = f"Timed out {waited}."
            plan.ended.append(life.end(request, Finish(FinishReason.TIMEOUT, message=message)))

    def _decide(self, plan: Plan, now: float) -> None:
        life = self._life
        mixing = not self.config.disable_mixed_chunk
        retracted = False
        if mixing:
            retracted = self._make_room(plan, now)
            if plan.reason:
                return
        first = None
        if not retracted and self._admission.urgent:
            first = self._preempt(plan, now)
            if plan.reason:
                return
        ratio = self._ratio.value
        admitted = self._admission.build(now, ratio, retracted=retracted, first=first)
        decoding = life.running if mixing or not admitted else []
        if decoding and not mixing:
            # The queue was looked at before: a strict pass that decodes has admitted nobody.
            retracted = self._make_room(plan, now)
            if plan.reason:
                return
            decoding = life.running
        if not admitted and not decoding:
            return
        plan.batch = self._book(admitted, decoding)
        if decoding and not retracted:
            self._ratio.decay()

    def _book(
        self, prefills: Sequence[Admitted], decodes: Sequence[Request], *, retry: bool = False
    ) -> ScheduleBatch:
        """Makes the step that will be launched, in all books."""
        restore = self._retries.take_touched(prefills, decodes)
        batch = book_batch(
            self._next_step, prefills, decodes, self._memory, retry=retry, restore=restore
        )
        self._next_step += 1
        self.counters.count_step(batch)
        self._life.launched(batch, prefills)
        return batch

    def _nothing_to_launch(self, plan: Plan) -> None:
        life = self._life
        if life.inflight:
            plan.reason = "wait_commit"
        elif life.queue or life.chunked is not None:
            term = self._admission.term
            # Nobody was refused, so all who wait do so for their loads.
            plan.reason = (BlockingTerm.KV_LOAD if term is BlockingTerm.NONE else term).value
        elif life.compiling:
            plan.reason = BlockingTerm.GRAMMAR.value
        else:
            plan.reason = "idle"
            self._ratio.reset()

    def _make_room(self, plan: Plan, now: float) -> bool:
        """Retracts until the running rows' next step fits, unless a step must be committed first:
        one in flight still names their pages, and holds tokens of theirs that are not known.
        Returns whether it retracted."""
        life = self._life
        if next_tokens_fit(life.running, self._memory):
            return False
        if life.inflight:
            plan.reason = "wait_commit"
            return False
        plan.ended += retract_until_fit(life, self.config.usable_tokens, now)
        self._ratio.after_retraction(life.running)
        return True

    def _preempt(self, plan: Plan, now: float) -> Request | None:
        """Makes way for a much higher priority, unless a step must be committed first; returns who
        is to start, if that can be."""
        first, victims = self._admission.urgent_start(now, self._ratio.value)
        if victims and self._life.inflight:
            plan.reason = "wait_commit"
            return None
        for request in victims:
            self._life.retract(request, now)
        self.counters.preemptions += len(victims)
        return first

    def commit(self, batch: ScheduleBatch, output: StepOutput, now: float) -> list[RequestOutput]:
        """Applies a step's result. Steps are committed, or failed, in the order of their launch.

        Returns: news per request, in batch order, for those still alive.
        """
        flight = self._life.done(batch)
        self._admission.sizer.observe(batch, output.device_s)
        failed = nan_recovery.failed_prompts(batch, output)
        again = nan_recovery.mark_for_isolated_retry(failed, flight.returning)
        outputs, ended = apply_results(batch, output, [*flight.returning, *again])
        self.counters.output_tokens += len(outputs)
        nan_recovery.drop_computed(failed, self._life)
        cleared = nan_recovery.end_isolation(batch, self._life)
        keep_prompts(batch, output, self._memory, now)
        for news in ended:
            assert news.finish is not None
            self._life.end(news.request, news.finish)
        self._life.committed(flight, now)
        if failed or cleared:
            self._life.start_anew(again, now)
        return outputs

    def fail(self, batch: ScheduleBatch, message: str, now: float) -> list[RequestOutput]:
        """The oldest step in flight could not be launched, or raised.

        It is taken back with every later step: lengths, pages, what was put into the cache, who
        was admitted. So the device must be done with the later ones; they are neither committed
        nor failed, whatever they gave. Then nothing is in flight.

        The failed step's rows are tried again by halves, one part at a time, by the next passes
        (`ScheduleBatch.retry`), until those that can be computed are. A step of one row is not
        tried again: its request ends with the error. A caller whose device is gone aborts all
        requests instead of going on; the next pass ends them and launches nothing.

        Returns: news of the request that ends, if it does.
        """
        flights = self._life.take_back(batch, now)
        self.counters.failed_steps += 1
        self._retries.touched(flights)
        if len(batch.requests) > 1:
            self._retries.add(flights[0])
            return []
        (request,) = batch.requests
        if flights[0].gave_up(request) or request.ending is not None:
            return []  # it ends otherwise
        return [self._life.end(request, Finish(FinishReason.ERROR, message=message))]

    def adopt(self, prefixes: Sequence[TierPrefix]) -> None:
        """Takes over what the tier holds from before, the oldest first. To be called once, before
        the first request.

        Raises: InvariantError: there is no tier, or it is too small for that.
        """
        self._tier().adopt(prefixes)
        self._recount.books_change()

    def stored(self, copy_id: int, pages: int) -> int:
        """A copy that a plan named is done; its first `pages` pages were read.

        Returns: how many of them are to be kept, since they were cached all the while.
        """
        behind = self._tier().write_behind
        self.counters.failed_copies += pages < behind.pages_of_copy(copy_id)
        kept = behind.stored(copy_id, pages)
        self.counters.stored_pages += kept
        self._recount.books_change()
        return kept

    @property
    def copies_pending(self) -> bool:
        """Whether pages are still to be copied to the tier: further passes name them."""
        tier = self._memory.tier
        return tier is not None and tier.write_behind.pending

    def loaded(self, load_id: int, pages: int) -> None:
        """A load that a plan named is done; its first `pages` pages hold what they should."""
        tier = self._tier()
        self.counters.failed_loads += pages < tier.pages_of_load(load_id)
        self.counters.loaded_tokens += tier.loaded(load_id, pages)
        self._recount.books_change()

    def _tier(self) -> KVTier:
        if self._memory.tier is None:
            raise InvariantError("there is no tier below the pool")
        return self._memory.tier

    def change_options(self, **changes: Any) -> None:
        """Changes options while requests run; they rule from the next pass on.

        Raises: ConfigError: an option that the books are laid out by, or a value not allowed.
        """
        for name in changes:
            if name in FIXED_OPTIONS:
                raise ConfigError(f"{name} cannot be changed while serving")
        self.config = replace(self.config, **changes)
        self._recount.books_change()
        self._memory.configure(self.config)
        self._life.configure(self.config)
        self._admission.configure(self.config)
        if "schedule_conservativeness" in changes:
            self._ratio = NewTokenRatio(self.config.schedule_conservativeness)

    def flush(self) -> bool:
        """Empties the cache, and the tier below it. Returns False while any request is alive, or a
        step or a load in flight."""
        tier = self._memory.tier
        if self.has_unfinished or (tier is not None and tier.loading):
            return False
        self._memory.cache.flush()
        if tier is not None:
            tier.clear()
        self._recount.books_change()
        return True

    def watch_cache(self) -> CacheEvents:
        """Starts to note what enters and leaves the cache. To be called once, before the first
        request.

        Returns: what is noted, to be read between passes.
        """
        return self._memory.watch()

    def statistics(self) -> SchedulerStatistics:
        """The scheduler at this moment."""
        return take_statistics(self._life, self._admission, self._ratio.value, self._recount.error)

    @property
    def slo_feasible(self) -> bool | None:
        """Whether even the smallest chunk holds --tpot-slo-ms; None: no target, or not known yet.
        As in `statistics`, but cheap enough to ask after every step."""
        return self._admission.sizer.feasible

    @property
    def requests(self) -> list[RequestDebug]:
        """A record of every live request, oldest first: where it is, and how long it has waited
        for what."""
        return [debug_record(request, self._life) for request in self._life.live.values()]

    def glance(self, most_requests: int, most_runs: int) -> Glance:
        """Where requests are and what is cached, at most so many of each: for who watches."""
        return take_glance(self._life, most_requests, most_runs)

    def waited_seconds(self, request: Request) -> dict[str, float]:
        """Seconds that a request, alive or ended, has waited per blocking term."""
        return self._life.clocks.waited_seconds(request)

    def check(self) -> None:
        """Recounts every book.

        Raises: InvariantError: naming the first that is wrong.
        """
        launched = [flight.batch for flight in self._life.inflight]
        check_books(self._memory, self._life.holders, launched)

    def check_some(self) -> bool:
        """When idle, recounts for a fraction of a millisecond; decides nothing, and changes nothing
        but `invariant_error`. To be called whenever there is nothing else to do.

        Returns: whether more is left to recount.
        """
        return not self.has_unfinished and self._recount.step()
