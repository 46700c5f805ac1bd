"""A live run without a model, for the tests: random traffic through a recorded scheduler."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runtime.config import SchedulerConfig
from runtime.errors import LoomserveError
from runtime.request import Finish, FinishReason, Request, SamplingParams
from runtime.simulation.recorder import RecordingScheduler
from runtime.simulation.sim_runner import SimRunner
from runtime.simulation.trace import TraceWriter

if TYPE_CHECKING:
    from pathlib import Path

    from runtime.scheduling.schedule_batch import ScheduleBatch

EOS = 2


@dataclass
class CompilingGrammar:
    """Becomes ready after a number of looks, as if another thread compiled it meanwhile."""

    looks: int

    @property
    def ready(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def live_config(**options: Any) -> SchedulerConfig:
    """A pool so small that running requests are retracted, and prompts longer than a chunk."""
    given = {
        "capacity_tokens": 1024,
        "context_length": 512,
        "page_size": 4,
        "max_running_requests": 12,
        "chunked_prefill_size": 32,
        "schedule_conservativeness": 0.1,
        "clip_max_new_tokens": 16,
        "eos_token_ids": frozenset({EOS}),
        "max_queued_requests": 40,
        "waiting_timeout_s": 20.0,
    }
    return SchedulerConfig(**{**given, **options})


@dataclass
class LiveTraffic:
    """Drives a recorded scheduler with overlap, until it has run a number of steps.

    Requests come in bursts, some with prefixes in common; some are aborted at any moment, some
    ended for a text stop; some steps fail, some rows give no token; now and then the cache is
    flushed, once all are aborted together."""

    config: SchedulerConfig
    path: Path
    seed: int = 0
    now: float = 100.0
    counts: dict[str, int] = field(default_factory=dict)

    def run(self, steps: int) -> RecordingScheduler:
        self._random = random.Random(self.seed)
        self._runner = SimRunner(
            max_total_tokens=self.config.capacity_tokens, page_size=self.config.page_size
        )
        self._live: list[str] = []
        self._made = 0
        writer = TraceWriter(self.path, self.config)
        scheduler = RecordingScheduler(self.config, writer)
        try:
            self._serve(scheduler, steps)
        finally:
            writer.close()
        counters = scheduler.statistics().counters
        self.counts |= {
            "retractions": counters.retractions,
            "preemptions": counters.preemptions,
            "chunks": counters.chunks,
        }
        return scheduler

    def _serve(self, scheduler: RecordingScheduler, steps: int) -> None:
        in_flight: tuple[ScheduleBatch, list[int]] | None = None
        done = idle_passes = 0
        while done < steps or scheduler.has_unfinished:
            if done < steps:
                self._disturb(scheduler, done)
            self._tick()
            plan = scheduler.plan(self.now)
            self._note(plan.ended)
            launched = None
            if plan.batch is not None:
                pending = self._runner.launch(plan.batch)
                pending.sample(None)
                launched = (plan.batch, pending.result().token_ids)
                done += 1
                idle_passes = 0
                if plan.batch.retry:
                    self._count("retries")
            idle_passes += 1
            assert idle_passes < 5000, f"stuck: {plan.reason}, {scheduler.statistics()}"
            if in_flight is not None and not self._settle(scheduler, *in_flight):
                launched = None
            in_flight = launched
            scheduler.check()

    def _tick(self) -> None:
        self.now += self._random.expovariate(50.0)

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def _settle(
        self, scheduler: RecordingScheduler, batch: ScheduleBatch, tokens: list[int]
    ) -> bool:
        """Commits a step, or fails it; then the later one that is launched is dropped: False."""
        self._tick()
        draw = self._random.random()
        if draw < 0.003:
            self._count("failed steps")
            self._note(scheduler.fail(batch, "the device was lost", self.now))
            return False
        # The runner's tokens, but for an EOS now and then.
        tokens = [EOS if self._random.random() < 0.01 else token for token in tokens]
        output = self._runner_output(tokens)
        if tokens and draw < 0.013:
            self._count("failed rows")
            output.failed[self._random.randrange(len(tokens))] = "a NaN among the logits"
        self._note(scheduler.commit(batch, output, self.now))
        return True

    def _runner_output(self, tokens: list[int]) -> Any:
        from runtime.runner import StepOutput

        return StepOutput(tokens, device_s=self._random.uniform(0.01, 0.03))

    def _note(self, outputs: list[Any]) -> None:
        for output in outputs:
            if output.finish is not None:
                self._live.remove(output.request.request_id)
                self._count(output.finish.reason.value)

    def _disturb(self, scheduler: RecordingScheduler, step: int) -> None:
        draw = self._random
        if draw.random() < 0.10:
            for _ in range(draw.randint(1, 5)):
                self._arrive(scheduler)
        if self._live and draw.random() < 0.02:
            self._count("aborts")
            scheduler.abort(draw.choice(self._live))
        if self._live and draw.random() < 0.02:
            self._count("text stops")
            stopped = draw.choice(self._live)
            if scheduler.finish(stopped, Finish(FinishReason.STOP, "END")):
                self._live.remove(stopped)  # the caller knows: there is no output about it
        if draw.random() < 0.01:
            self._count("unknown aborts")
            assert not scheduler.abort("nobody")
        if draw.random() < (0.01 if scheduler.has_unfinished else 0.5):
            scheduler.flush()
        if step == 700 and "going down" not in self.counts:
            self._count("going down")
            scheduler.abort_all("going down")
        if step == 1000:
            scheduler.change_options(schedule_policy="fcfs", clip_max_new_tokens=16)

    def _arrive(self, scheduler: RecordingScheduler) -> None:
        draw = self._random
        prompt = list(range(10, 10 + draw.choice((0, 16, 40)))) + [
            draw.randint(10, 400) for _ in range(draw.randint(1, 120))
        ]
        priority = draw.choice((0, 0, 0, 0, 5, 20))
        choices = []
        for _ in range(draw.choice((1, 1, 1, 1, 3))):
            self._made += 1
            choices.append(self._request(f"r{self._made}", prompt, priority))
        if len(choices) > 1:
            self._count("groups")
        try:
            self._note(scheduler.add_group(choices, self.now))
            self._live.extend(request.request_id for request in choices)
        except LoomserveError as error:
            self._count(type(error).__name__)

    def _request(self, request_id: str, prompt: list[int], priority: int) -> Request:
        draw = self._random
        return Request(
            request_id=request_id,
            input_ids=array("i", prompt),
            sampling=SamplingParams(
                max_new_tokens=draw.choice((None, 1, 8, 64, 200, 600)),
                ignore_eos=draw.random() < 0.3,
                stop_token_ids=frozenset({57} if draw.random() < 0.2 else ()),
                temperature=0.7,
            ),
            arrival_s=self.now,
            priority=priority,
            namespace=draw.choice(("", "", "tenant")),
            deadline_s=self.now + 3.0 if draw.random() < 0.05 else None,
            grammar=CompilingGrammar(draw.randint(0, 30)) if draw.random() < 0.1 else None,
        )
