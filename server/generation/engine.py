"""The step loop: the only code that waits for a step.

    plan N+1 -> launch N+1 -> wait for N -> commit N -> deliver its tokens -> mask and sample N+1

Step N + 1 is launched before N is read, so the device never waits for the host. Only its sampling
waits, and only where a grammar must first see N's tokens. Nothing here waits for a client.

    N fails -> wait for N+1, drop its result -> probe the device -> the scheduler takes both back

Then the scheduler plans N's rows again by halves, until the row that cannot be computed is alone
and ends. A device that is gone, or a fault of the loop itself, ends the engine: every present and
later request gets `EngineDead`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.errors import EngineDead
from runtime.request import Finish, FinishReason
from runtime.runner import failed_step
from server.generation.delivery import Delivery, kind_of
from server.generation.output import ChoiceOutput, RequestStream
from server.generation.step_reports import LoopStep, StepReports
from server.generation.token_masks import needs_mask, token_masks

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.offload.page_store import PageStore
    from runtime.request import Request
    from runtime.runner import LaunchedStep, Runner
    from runtime.scheduling.scheduler import Scheduler
    from server.generation.kv_events import KVEventPublisher
    from server.generation.metrics import Metrics
    from server.generation.output import ChoiceRules
    from server.text.tokenizer import Tokenizer

log = logging.getLogger("loomserve.engine")

# Requests may wait for the clock (a time limit, the prefill delayer) while no step runs.
POLL_SECONDS = 0.02
# A server that is told to stop goes on copying finished pages to its tier for so long.
STOP_COPYING_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is, as whoever routes requests compares it with others.

    Args:
        tokens: KV that running requests hold, and the prompts of those that wait.
        kv_usage: share of the pool that running requests hold, 0 to 1.
    """

    running: int
    waiting: int
    tokens: int
    kv_usage: float


class Engine:
    """The step loop: plans, launches, reads and commits steps, and has their tokens delivered.

    Args:
        overlap: plan and launch the next step before the last one is read.
        kv_events: told whenever the prefix cache may have changed; None: nobody listens.
        tier: performs the copies and loads that the scheduler names; None: it names none.
        clock: seconds; the scheduler sees no other time.

    Attributes:
        dead: why the loop has ended by itself; None: it has not.
        delivery: what is being generated, and for whom.
        records, watch_steps: see `StepReports`.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        metrics: Metrics,
        *,
        overlap: bool = True,
        kv_events: KVEventPublisher | None = None,
        tier: PageStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.clock = clock
        self.dead: EngineDead | None = None
        self._overlap = overlap
        self._kv_events = kv_events
        self._tier = tier
        self._wake = asyncio.Event()  # of the idle loop
        self.delivery = Delivery(scheduler, metrics, clock, self._wake.set)
        self._stopping = False
        self._stop_copying_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._reports = StepReports(scheduler, metrics)
        self.records = self._reports.records
        self.watch_steps = self._reports.watch

    def start(self) -> None:
        """Starts the loop as a task of the running event loop."""
        if self._tier is not None:
            loop = asyncio.get_running_loop()
            self._tier.report_to(
                lambda *done: _call_soon(loop, lambda: self._stored(*done)),
                lambda *done: _call_soon(loop, lambda: self._loaded(*done)),
            )
        self._task = asyncio.create_task(self._guarded_run(), name="engine")

    async def stop(self) -> None:
        """Ends every request, waits for the steps in flight, ends the loop. Idempotent."""
        self._stopping = True
        self._stop_copying_s = self.clock() + STOP_COPYING_SECONDS
        for request_id in self.delivery.live:
            self.scheduler.abort(request_id)
        self.delivery.fail_all(EngineDead("the server is stopping"))
        self._wake.set()
        if self._task is not None:
            await self._task
        if self._kv_events is not None:
            self._kv_events.close()
            self._kv_events = None
        if self._tier is not None:
            await asyncio.to_thread(self._tier.close)

    def submit(
        self, requests: list[Request], rules: ChoiceRules, received_s: float | None = None
    ) -> RequestStream:
        """Queues requests that one client waits for together: all of them, or none.

        Args: received_s: when the client's request was read; None: now.
        Raises: InvalidRequest, ContextTooLong, QueueFull, EngineDead; then none is queued.
        """
        if self.dead is not None:
            raise self.dead
        if self._stopping:
            raise EngineDead("the server is stopping")
        now = self.clock()
        stream = RequestStream(requests, now if received_s is None else received_s)
        choices = [
            ChoiceOutput(index, stream, rules, self.tokenizer) for index in range(len(requests))
        ]
        displaced = self.scheduler.add_group(requests, now)
        for choice in choices:
            self.delivery.follow(choice)
        self.delivery.at_once(displaced, now)
        self._wake.set()
        return stream

    def abort(self, stream: RequestStream, message: str | None = None) -> None:
        """Ends what is left of a stream's choices. Unknown or ended ones are left alone."""
        for request in stream.requests:
            choice = self.delivery.live.get(request.request_id)
            if choice is not None:
                self.scheduler.abort(request.request_id, message)
                self.delivery.close(choice, Finish(FinishReason.ABORT, message=message))
                self._wake.set()

    def flush_cache(self) -> bool:
        """Empties the prefix cache. Returns False, and changes nothing, where anything runs."""
        flushed = self.scheduler.flush()
        if flushed and self._tier is not None:
            self._tier.clear()
        if self._kv_events is not None:
            self._kv_events.publish()
        return flushed

    def load(self) -> Load:
        """At this moment. Costs a look at every request that waits."""
        now = self.scheduler.statistics()
        waiting = [
            choice.request for choice in self.delivery.live.values() if choice.request.row < 0
        ]
        tokens = now.used_tokens + sum([len(request.input_ids) for request in waiting])
        return Load(now.active, now.queued, tokens, now.kv_usage)

    async def _guarded_run(self) -> None:
        try:
            await self._run()
        except BaseException as error:
            log.critical("the engine loop failed", exc_info=error)
            known = isinstance(error, EngineDead)
            message = str(error) if known else f"internal error ({kind_of(error)})"
            self.dead = EngineDead(f"the engine has stopped: {message}")
            self.delivery.fail_all(self.dead)
            if not isinstance(error, Exception):
                raise

    async def _run(self) -> None:
        flight: LoopStep | None = None
        reason = ""
        while not (self._stopping and flight is None and self._all_done()):
            following, reason = self._plan_and_launch(reason)
            if flight is not None and not await self._finish(flight, following):
                following = None
            if self._kv_events is not None:
                self._kv_events.publish()
            if following is not None:
                await self._sample(following)
                if not self._overlap:
                    await self._finish(following, None)
                    following = None
            elif flight is not None:
                # What is done when idle may take a while: the last tokens go out before it.
                await asyncio.sleep(0)
            else:
                await self._rest()
            flight = following

    def _plan_and_launch(self, last_reason: str) -> tuple[LoopStep | None, str]:
        """Launches the next step, if there is one; also why there was none."""
        planned = self.clock()
        plan = self.scheduler.plan(planned)
        self.delivery.at_once(plan.ended, planned)
        if self._tier is not None:
            self._tier.begin(plan.copies, plan.loads)
        batch = plan.batch
        if batch is None:
            return None, plan.reason
        launched = self.clock()
        try:
            step = self.runner.launch(batch)
        except Exception as error:
            step = failed_step(error)  # in its turn, after the step before it is committed
        if not self.delivery.masked or not needs_mask(batch, self.delivery.live):
            step.sample(None)
        for row in range(batch.num_prefill):
            choice = self.delivery.live.get(batch.requests[row].request_id)
            if choice is not None:
                choice.timeline.launched(batch, row, launched)
        return LoopStep(batch, step, last_reason, planned, launched, self.clock()), ""

    def _stored(self, copy_id: int, pages: int) -> None:
        assert self._tier is not None
        self._tier.keep(copy_id, self.scheduler.stored(copy_id, pages))
        self._wake.set()  # there may be more to copy

    def _loaded(self, load_id: int, pages: int) -> None:
        self.scheduler.loaded(load_id, pages)
        self._wake.set()

    async def _sample(self, flight: LoopStep) -> None:
        """Lets a step sample whose masks had to wait for the tokens of the step before."""
        if not flight.step.may_sample:
            vocab_size = self.runner.info.vocab_size
            masks = await token_masks(
                flight.batch, self.delivery.live, vocab_size, self.delivery.fail
            )
            flight.masked_rows = len(masks.rows) if masks is not None else 0
            flight.step.sample(masks)

    async def _finish(self, flight: LoopStep, later: LoopStep | None) -> bool:
        """Waits for a step, applies and delivers what it gave.

        Args: later: the step launched after it. Where this one failed it is dropped.
        Returns: whether it gave anything.
        """
        try:
            await _done(flight.step)
            output = flight.step.result()
        except Exception as error:
            await self._take_back(flight, later, error)
            return False
        done = self.clock()
        news = self.scheduler.commit(flight.batch, output, done)
        applied = self.clock()
        await self.delivery.step(news, done)
        self._reports.step(flight.record(output, done, applied, self.clock()))
        return True

    async def _take_back(self, flight: LoopStep, later: LoopStep | None, error: Exception) -> None:
        """A step has failed: neither it nor the one after it has ever been, for the scheduler.

        Raises: EngineDead: the device is gone.
        """
        log.error("step %d failed", flight.batch.step, exc_info=error)
        if later is not None:
            await _drained(later.step)
        try:
            await asyncio.to_thread(self.runner.probe)
        except Exception as gone:
            raise EngineDead(f"the device is gone ({kind_of(gone)})") from gone
        now = self.clock()
        news = self.scheduler.fail(flight.batch, "the model step failed", now)
        applied = self.clock()
        self.delivery.at_once(news, now)
        self._reports.step(flight.record(None, now, applied, self.clock(), failed=kind_of(error)))

    def _all_done(self) -> bool:
        """Whether the loop may end: nobody is served, and finished pages are kept, as far as that
        takes no time."""
        if self.scheduler.has_unfinished:
            return False
        return not self.scheduler.copies_pending or self.clock() > self._stop_copying_s

    async def _rest(self) -> None:
        """Nothing to compute: waits for work, or for the clock where requests wait for it."""
        if self.scheduler.has_unfinished:
            await self._woken(POLL_SECONDS)
            return
        if self._stopping:
            if not self._all_done():
                await self._woken(POLL_SECONDS)
            return
        while self.scheduler.check_some():
            await asyncio.sleep(0)
            if self._wake.is_set():  # what comes meanwhile goes first
                return
        self._reports.recounted()
        await self._woken(None)

    async def _woken(self, limit_s: float | None) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()


async def _done(step: LaunchedStep) -> None:
    """Waits until `step.result()` would not block. Always lets other tasks run once."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def set_done() -> None:
        if not future.done():
            future.set_result(None)

    step.add_done_callback(lambda: _call_soon(loop, set_done))
    await future


async def _drained(step: LaunchedStep) -> None:
    """Waits until the device is done with a step whose result nobody wants."""
    if not (step.may_sample or step.done):
        step.sample(None)
    await _done(step)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function)
