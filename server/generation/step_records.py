"""A ring of the last steps: what each computed, how long it took, why it was what it was.

Written by the engine, one record per step; read by /debug/steps, the metrics and tests. A record
holds counts and times only, never text or token ids.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. Times are seconds on the engine's clock.

    Args:
        step: its number.
        kind: "prefill", "decode" or "mixed".
        prefill_rows, decode_rows, prefill_tokens: what it computed.
        sampled_rows: rows whose next token was sampled: all but the middle chunks of prompts.
        masked_rows: rows sampled under a grammar or bad words.
        decode_ids: request ids of its decode rows; prefill_ids of its prefill rows.
        reason: why the plan before it gave no batch ("" where it followed at once).
        planned_s, launched_s, sent_s: the host began to plan it, to launch it, and was done. With
            overlap these moments of the next step lie between sent_s and done_s.
        ended_s: the device was done with it.
        done_s, applied_s, committed_s: its result was read, applied to the scheduler, delivered.
        plan_s: seconds that planning it took. device_s: seconds the device spent on it.
        idle_s: seconds that the device stood still before it; None: there was nothing to compute.
        queueing_s: seconds that a thread spent on queueing it, where the device has a queue.
        compiled_kernels: see `StepOutput`.
        retry: its rows were in a step that failed.
        failed: why the whole step failed, or None.
    """

    step: int
    kind: str
    prefill_rows: int
    decode_rows: int
    prefill_tokens: int
    sampled_rows: int
    masked_rows: int
    prefill_ids: tuple[str, ...]
    decode_ids: tuple[str, ...]
    reason: str
    planned_s: float
    launched_s: float
    sent_s: float
    ended_s: float
    done_s: float
    applied_s: float
    committed_s: float
    plan_s: float
    device_s: float
    idle_s: float | None
    queueing_s: float = 0.0
    compiled_kernels: int = 0
    retry: bool = False
    failed: str | None = None

    @property
    def host_s(self) -> float:
        """Seconds of the host's own work: to plan, launch or queue, apply and deliver it."""
        sent_s = max(self.sent_s - self.launched_s, self.queueing_s)
        return self.plan_s + sent_s + self.committed_s - self.done_s


class StepRecords:
    """The last `capacity` step records and the number of steps ever recorded."""

    __slots__ = ("_ring", "total")

    def __init__(self, capacity: int = 1024) -> None:
        self._ring: deque[StepRecord] = deque(maxlen=capacity)
        self.total = 0

    def append(self, record: StepRecord) -> None:
        self._ring.append(record)
        self.total += 1

    def __iter__(self) -> Iterator[StepRecord]:
        """Oldest first."""
        return iter(self._ring)

    def __len__(self) -> int:
        return len(self._ring)

    def last(self, count: int) -> list[StepRecord]:
        """The newest `count` records, oldest first."""
        return list(self._ring)[-count:] if count > 0 else []
