"""What a simulated run looked like from inside, step by step: the queue, the pool, who waited and
for what."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.request import Request
    from runtime.scheduling.schedule_batch import ScheduleBatch
    from runtime.scheduling.scheduler import Scheduler


@dataclass(slots=True)
class Prefill:
    """A prompt, or the next part of one, in a step.

    Args: step: counted from the run's first, 0. tokens: computed there; start: those before.
    """

    step: int
    start: int
    tokens: int


@dataclass(slots=True)
class Observation:
    """The scheduler's state at every launched step, as parallel columns, and what became of each
    request.

    Args:
        blocked: the term that held the queue back when the step was planned, "" for none.
        waiting, running: requests. free_tokens, cached_tokens, private_tokens: of the KV pool.
        prefills: by request id, in order; a retracted request is computed again.
        waited_s: by request id and blocking term, of requests that have ended.
    """

    scheduler: Scheduler
    blocked: list[str] = field(default_factory=list)
    waiting: array[int] = field(default_factory=lambda: array("i"))
    running: array[int] = field(default_factory=lambda: array("i"))
    free_tokens: array[int] = field(default_factory=lambda: array("i"))
    cached_tokens: array[int] = field(default_factory=lambda: array("i"))
    private_tokens: array[int] = field(default_factory=lambda: array("i"))
    prefills: dict[str, list[Prefill]] = field(default_factory=dict)
    waited_s: dict[str, dict[str, float]] = field(default_factory=dict)

    def launched(self, batch: ScheduleBatch) -> None:
        """A step was launched: one more entry in every column."""
        step = len(self.blocked)
        now = self.scheduler.statistics()
        self.blocked.append(now.reason)
        self.waiting.append(now.queued)
        self.running.append(now.active)
        self.free_tokens.append(now.free_tokens)
        self.cached_tokens.append(now.cached_tokens)
        self.private_tokens.append(now.private_tokens)
        for i in range(batch.num_prefill):
            part = Prefill(step, batch.prefix_lens[i], batch.extend_lens[i])
            self.prefills.setdefault(batch.requests[i].request_id, []).append(part)

    def ended(self, request: Request) -> None:
        """A request is over: what it waited for will not change any more."""
        self.waited_s[request.request_id] = self.scheduler.waited_seconds(request)
