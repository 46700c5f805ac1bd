"""The live view: samples of what the engine does, for whoever watches, a few times a second.

A sample is taken, and encoded, once for all watchers. What it costs is bounded: at most so many
requests, cached runs and steps are in it. Steps come from the engine's own ring of records, so a
step costs nothing more while somebody looks. A watcher has room for one sample: a reader that is
slower than the samples gets the newest when it comes back, and what it missed is gone. Nobody
watches: nothing runs.

A sample holds ids, counts and times; never text or token ids.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import orjson

from runtime.errors import QueueFull
from runtime.scheduling.statistics import RequestDebug
from server.observability.forecast import Rates, Waiting, expected_starts
from server.observability.latency_windows import LatencyWindow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.scheduling.glance import Glance
    from runtime.scheduling.statistics import SchedulerStatistics
    from server.generation.engine import Engine
    from server.generation.step_records import StepRecord

log = logging.getLogger("loomserve.live")

INTERVAL_S = 0.25
IDLE_INTERVAL_S = 5.0  # while nothing happens: says that the server is still there
MOST_WATCHERS = 8
MOST_REQUESTS = 32  # of each kind
MOST_RUNS = 12
FIRST_STEPS = 400  # that a watcher is shown of what was before it came
MOST_STEPS = 256  # of a later sample
RATE_STEPS = 100  # that the pace of late is taken from


class Watcher:
    """One reader's place: the newest sample that it has not taken."""

    def __init__(self) -> None:
        self._sample: bytes | None = None
        self._news = asyncio.Event()
        self.closed = False

    def offer(self, sample: bytes) -> None:
        """Puts a sample in place of the one that waits, if any."""
        self._sample = sample
        self._news.set()

    def close(self) -> None:
        self.closed = True
        self._news.set()

    async def take(self) -> bytes | None:
        """Waits for a sample; None: there will be no more."""
        await self._news.wait()
        self._news.clear()
        sample, self._sample = self._sample, None
        if sample is not None and self.closed:
            self._news.set()  # and then the end
        return sample


class LiveView:
    """Takes samples while somebody watches."""

    def __init__(self, engine: Engine, *, interval_s: float = INTERVAL_S) -> None:
        self.watchers: set[Watcher] = set()
        self._engine = engine
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None

    def watch(self) -> Watcher:
        """A watcher, whose first sample shows the steps before it came. To be handed to `leave`.

        Raises: QueueFull: too many watch already.
        """
        if len(self.watchers) >= MOST_WATCHERS:
            raise QueueFull(f"{MOST_WATCHERS} watch already, as many as may", retry_after_s=5.0)
        watcher = Watcher()
        watcher.offer(LiveSampler(self._engine, FIRST_STEPS).sample(FIRST_STEPS))
        self.watchers.add(watcher)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="live view")
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Ends a watcher; with the last one, sampling. Idempotent."""
        self.watchers.discard(watcher)
        if not self.watchers and self._task is not None:
            self._task.cancel()
            self._task = None

    def close(self) -> None:
        """Ends every watcher: the server is stopping."""
        for watcher in list(self.watchers):
            watcher.close()
            self.leave(watcher)

    async def _run(self) -> None:
        sampler = LiveSampler(self._engine)
        since_s = 0.0
        try:
            while True:
                await asyncio.sleep(self._interval_s)
                since_s += self._interval_s
                if not sampler.news and since_s < IDLE_INTERVAL_S:
                    continue
                since_s = 0.0
                sample = sampler.sample(MOST_STEPS)
                for watcher in self.watchers:
                    watcher.offer(sample)
        except Exception:
            log.exception("the live view has failed; serving goes on")
            for watcher in self.watchers:
                watcher.close()


class LiveSampler:
    """Makes samples, each of what is new since the one before.

    Args: back: steps before now that count as new to the first one.
    """

    def __init__(self, engine: Engine, back: int = 0) -> None:
        self._engine = engine
        self._seen = max(engine.records.total - back, 0)  # steps
        self._last_s = engine.clock()
        self._was_busy = True
        metrics = engine.metrics
        self._ttft = LatencyWindow(metrics.time_to_first_token)
        self._itl = LatencyWindow(metrics.inter_token_latency)
        self._output_tokens = engine.scheduler.counters.output_tokens

    @property
    def news(self) -> bool:
        """Whether a sample would differ from the last one."""
        engine = self._engine
        busy = engine.scheduler.has_unfinished
        return busy or self._was_busy or engine.records.total != self._seen

    def sample(self, most_steps: int) -> bytes:
        """What is new, as JSON. most_steps: of older ones only the number is told."""
        engine = self._engine
        now = engine.clock()
        self._was_busy = engine.scheduler.has_unfinished
        statistics = engine.scheduler.statistics()
        glance = engine.scheduler.glance(MOST_REQUESTS, MOST_RUNS)
        new = engine.records.total - self._seen
        recent = engine.records.last(max(min(new, most_steps), RATE_STEPS) + 1)
        figures = step_figures(recent)
        shown = min(new, most_steps, len(recent))
        sample = {
            "time_s": now,
            "seconds": now - self._last_s,
            "steps": figures[len(figures) - shown :],
            "steps_total": engine.records.total,
            "steps_left_out": new - shown,
            "pool": _pool(statistics),
            "queue": self._queue(statistics),
            "requests": self._requests(glance, statistics, figures),
            "runs": [run._asdict() for run in glance.runs],
            "all_runs": glance.whole_tree,
            "rates": self._rates(now - self._last_s),
            "ttft": self._ttft.news(),
            "itl": self._itl.news(),
        }
        self._seen, self._last_s = engine.records.total, now
        return orjson.dumps(sample)

    def _queue(self, now: SchedulerStatistics) -> dict[str, Any]:
        config = self._engine.scheduler.config
        return {
            "running": now.running,
            "prefilling": now.prefilling,
            "waiting": now.waiting,
            "waiting_grammar": now.waiting_grammar,
            "blocked_by": now.reason if now.full else "",
            "rows": config.max_running_requests,
            "free_rows": now.free_rows,
            "policy": config.schedule_policy,
            "chunk_tokens": now.chunk_tokens,
            "retractions": now.counters.retractions,
        }

    def _requests(
        self, glance: Glance, now: SchedulerStatistics, figures: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Those that wait in the order of the queue, then those that run."""
        rates = rates_of(figures, mean_output(self._engine))
        waiting = [
            Waiting(one.input_tokens + one.output_tokens, one.max_new_tokens)
            for one in glance.waiting
        ]
        starts: Sequence[float | None] = [None] * len(waiting)
        if rates is not None:
            starts = expected_starts(
                waiting,
                glance.holders,
                rates,
                free_rows=now.free_rows,
                free_tokens=now.free_tokens + now.evictable_tokens,
            )
        shown = [
            {**_request(one), "position": place + 1, "expected_start_s": start}
            for place, (one, start) in enumerate(zip(glance.waiting, starts, strict=True))
        ]
        return shown + [_request(one) for one in (*glance.compiling, *glance.admitted)]

    def _rates(self, seconds: float) -> dict[str, float | None]:
        """Tokens since the last sample; the cache's hit rate since the start."""
        counters = self._engine.scheduler.counters
        output = counters.output_tokens - self._output_tokens
        self._output_tokens = counters.output_tokens
        prompts = counters.prompt_tokens
        return {
            "output_tokens_s": output / seconds if seconds > 0 else 0.0,
            "hit_rate": counters.cached_tokens / prompts if prompts else None,
        }


def mean_output(engine: Engine) -> float | None:
    """Tokens of an answer on average; None: none has ended yet."""
    lengths = engine.metrics.request_generation_tokens
    count = sum(lengths.counts)
    return max(lengths.sum / count, 1.0) if count else None


def step_figures(records: Sequence[StepRecord]) -> list[dict[str, Any]]:
    """Steps as the page's timeline takes them (see server/page/timeline.js).

    A step's time begins where the one before it was done, if it was launched by then; the time
    between that and its launch is its gap. After an idle server there is none.
    """
    figures = []
    done_s: float | None = None
    for record in records:
        idle = record.reason == "idle" or done_s is None
        begin_s = record.launched_s if done_s is None else max(record.launched_s, done_s)
        figure: dict[str, Any] = {
            "step": record.step,
            "prefill_tokens": record.prefill_tokens,
            "prefill_rows": record.prefill_rows,
            "decode_rows": record.decode_rows,
            "step_ms": 1e3 * (record.done_s - begin_s),
            "host_ms": 1e3 * record.host_s,
            "gap_ms": 0.0 if idle or done_s is None else 1e3 * (begin_s - done_s),
        }
        note = _note(record)
        if note:
            figure["note"] = note
        if record.failed is not None:
            figure["failed"] = True
        figures.append(figure)
        done_s = record.done_s
    return figures


def _note(record: StepRecord) -> str:
    parts = []
    if record.reason:
        parts.append("after idle time" if record.reason == "idle" else f"after {record.reason}")
    if record.masked_rows:
        parts.append(f"{record.masked_rows} rows under a grammar")
    if record.retry:
        parts.append("a retry")
    if record.failed is not None:
        parts.append(record.failed)
    return ", ".join(parts)


def rates_of(figures: Sequence[dict[str, Any]], output_tokens: float | None) -> Rates | None:
    """The pace of these steps; None: they computed no prompt or no decode row, or took no time."""
    tokens = sum(one["prefill_tokens"] for one in figures)
    prefill_ms = sum(one["step_ms"] + one["gap_ms"] for one in figures if one["prefill_tokens"])
    decoding = [one["step_ms"] + one["gap_ms"] for one in figures if one["decode_rows"]]
    if not tokens or prefill_ms <= 0 or not decoding:
        return None
    return Rates(1e3 * tokens / prefill_ms, sum(decoding) / len(decoding) / 1e3, output_tokens)


def _pool(now: SchedulerStatistics) -> dict[str, int]:
    """KV tokens by who has them; the four kinds add up to the capacity."""
    return {
        "capacity": now.capacity_tokens,
        "free": now.free_tokens,
        "cached": now.cached_tokens,
        "private": now.private_tokens,
        "reserved": now.reserved_tokens,
        "evictable": now.evictable_tokens,
    }


_SHOWN = [field.name for field in dataclasses.fields(RequestDebug) if field.name != "waited_s"]


def _request(one: RequestDebug) -> dict[str, Any]:
    shown = {name: getattr(one, name) for name in _SHOWN}
    shown["waited_s"] = sum(one.waited_s.values())
    shown["waited_for"] = max(one.waited_s, key=one.waited_s.__getitem__, default="")
    return shown
