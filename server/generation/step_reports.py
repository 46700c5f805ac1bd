"""What the step loop tells of its steps: a record of each, metrics, and a word of what is amiss."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from server.generation.step_records import StepRecord, StepRecords
from server.generation.watchers import Watchers

if TYPE_CHECKING:
    from runtime.runner import LaunchedStep, StepOutput
    from runtime.scheduling.schedule_batch import ScheduleBatch
    from runtime.scheduling.scheduler import Scheduler
    from server.generation.metrics import Metrics

log = logging.getLogger("loomserve.engine")

# Why a plan gave no batch although there was work that could run.
_WORK_WENT_ON = ("", "wait_commit")


@dataclass(slots=True)
class LoopStep:
    """A step between launch and commit, and what its record will say of it."""

    batch: ScheduleBatch
    step: LaunchedStep
    reason: str  # why the plan before it gave no batch
    planned_s: float
    launched_s: float
    sent_s: float
    masked_rows: int = 0

    def record(
        self,
        output: StepOutput | None,
        done_s: float,
        applied_s: float,
        committed_s: float,
        *,
        failed: str | None = None,
    ) -> StepRecord:
        """What is kept of it, once it is over. output: None where it has failed."""
        batch = self.batch
        ids = [request.request_id for request in batch.requests]
        return StepRecord(
            step=batch.step,
            kind=batch.kind,
            prefill_rows=batch.num_prefill,
            decode_rows=batch.num_decode,
            prefill_tokens=batch.prefill_tokens,
            sampled_rows=len(batch.sampled),
            masked_rows=self.masked_rows,
            prefill_ids=tuple(ids[: batch.num_prefill]),
            decode_ids=tuple(ids[batch.num_prefill :]),
            reason=self.reason,
            planned_s=self.planned_s,
            launched_s=self.launched_s,
            sent_s=self.sent_s,
            ended_s=min(self.step.ended_s, done_s),
            done_s=done_s,
            applied_s=applied_s,
            committed_s=committed_s,
            plan_s=self.launched_s - self.planned_s,
            device_s=0.0 if output is None else output.device_s,
            idle_s=output.idle_s if output and self.reason in _WORK_WENT_ON else None,
            queueing_s=self.step.queueing_s,
            compiled_kernels=0 if output is None else output.compiled_kernels,
            retry=batch.retry,
            failed=failed,
        )


class StepReports:
    """Keeps records, counts, and warns once of each thing.

    Attributes:
        records: of the last steps.
        watch: see `Watchers`; a watcher is called with each record.
    """

    def __init__(self, scheduler: Scheduler, metrics: Metrics) -> None:
        self.records = StepRecords()
        self._scheduler = scheduler
        self._metrics = metrics
        self._watchers: Watchers[StepRecord] = Watchers()
        self.watch = self._watchers.watch
        self._broken: str | None = None  # the last failed recount that was reported
        self._target_feasible = True  # as last reported

    def step(self, record: StepRecord) -> None:
        """A step was committed, or has failed."""
        self.records.append(record)
        self._metrics.step(record)
        self._watchers.tell(record)
        self._watch_target()
        if record.compiled_kernels:
            log.warning(
                "step %d waited for %d kernels to be compiled, which the warm-up should have run",
                record.step,
                record.compiled_kernels,
            )

    def recounted(self) -> None:
        """The scheduler has recounted its books; says so where they are wrong."""
        broken = self._scheduler.statistics().invariant_error
        if broken is not None and broken != self._broken:
            self._broken = broken
            log.error("the scheduler's books are wrong, serving goes on: %s", broken)

    def _watch_target(self) -> None:
        """Says when --tpot-slo-ms gets out of reach, and when it is within reach again."""
        feasible = self._scheduler.slo_feasible
        if feasible is None or feasible is self._target_feasible:
            return
        self._target_feasible = feasible
        target_ms = self._scheduler.config.tpot_slo_ms
        if feasible:
            log.info("tpot_slo_ms %g is feasible again", target_ms)
            return
        predicted_s = self._scheduler.statistics().predicted_step_s or 0.0
        log.warning(
            "tpot_slo_ms %g is not feasible: a step with these decode rows and the smallest chunk"
            " is expected to take up to %.1f ms",
            target_ms,
            1e3 * predicted_s,
        )
