"""A scheduler that writes down what it is told and what it decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from runtime.scheduling.scheduler import Scheduler
from runtime.simulation.trace import (
    Event,
    batch_record,
    copies_record,
    finish_record,
    outputs_record,
    prefixes_record,
    request_record,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runtime.config import SchedulerConfig
    from runtime.request import Finish, Grammar, Request, RequestOutput
    from runtime.runner import StepOutput
    from runtime.scheduling.kv_tier import TierPrefix
    from runtime.scheduling.plan import Plan
    from runtime.scheduling.schedule_batch import ScheduleBatch

P = ParamSpec("P")
T = TypeVar("T")


class EventWriter(Protocol):
    """Where the events go; `TraceWriter` in service, a list in a replay."""

    def write(self, event: Event) -> None: ...
    def close(self) -> None: ...


class LatchedGrammar:
    """A grammar whose readiness changes only between two calls of the scheduler.

    Compilation ends in another thread at any moment; a recorded decision must have seen the
    readiness that the trace states."""

    def __init__(self, inner: Grammar) -> None:
        self._inner = inner
        self.ready = inner.ready

    def refresh(self) -> bool:
        """Whether it has become ready since the last look."""
        before, self.ready = self.ready, self._inner.ready
        return self.ready and not before


class RecordingScheduler(Scheduler):
    """A scheduler that writes to a trace what it is told and what it decides. What neither changes
    nor asks for a decision (statistics, debug records) is not written."""

    def __init__(self, config: SchedulerConfig, writer: EventWriter) -> None:
        super().__init__(config)
        self._writer = writer
        self._latched: list[tuple[Request, LatchedGrammar]] = []  # those not ready yet

    def add_group(self, requests: Sequence[Request], now: float) -> list[RequestOutput]:
        for request in requests:
            if request.grammar is not None:
                request.grammar = LatchedGrammar(request.grammar)
        records = [request_record(request) for request in requests]
        # A group of one is the same to the scheduler, and the common case in a trace.
        event: Event = {"event": "add", "now": now, "request": records[0]}
        if len(requests) != 1:
            event = {"event": "add_group", "now": now, "requests": records}
        outputs = self._call(event, super().add_group, requests, now)
        self._write(event, outputs=outputs_record(outputs))
        self._latched += [
            (request, request.grammar)
            for request in requests
            if isinstance(request.grammar, LatchedGrammar) and not request.grammar.ready
        ]
        return outputs

    def abort(self, request_id: str, message: str | None = None) -> bool:
        event: Event = {"event": "abort", "id": request_id, "message": message}
        result = self._call(event, super().abort, request_id, message)
        self._write(event, result=result)
        return result

    def abort_all(self, message: str | None = None) -> int:
        event: Event = {"event": "abort_all", "message": message}
        result = self._call(event, super().abort_all, message)
        self._write(event, result=result)
        return result

    def finish(self, request_id: str, finish: Finish) -> bool:
        event: Event = {"event": "finish", "id": request_id, "finish": finish_record(finish)}
        result = self._call(event, super().finish, request_id, finish)
        self._write(event, result=result)
        return result

    def plan(self, now: float) -> Plan:
        self._look_at_grammars()
        event: Event = {"event": "plan", "now": now}
        plan = self._call(event, super().plan, now)
        self._write(
            event,
            batch=None if plan.batch is None else batch_record(plan.batch),
            reason=plan.reason,
            ended=outputs_record(plan.ended),
            grammars_ready=plan.grammars_ready,
            **copies_record(plan),
        )
        return plan

    def commit(self, batch: ScheduleBatch, output: StepOutput, now: float) -> list[RequestOutput]:
        event: Event = {
            "event": "commit",
            "now": now,
            "step": batch.step,
            "tokens": list(output.token_ids),
            "failed": {str(index): reason for index, reason in output.failed.items()},
            "device_s": output.device_s,
        }
        outputs = self._call(event, super().commit, batch, output, now)
        self._write(event, outputs=outputs_record(outputs))
        return outputs

    def fail(self, batch: ScheduleBatch, message: str, now: float) -> list[RequestOutput]:
        event: Event = {"event": "fail", "now": now, "step": batch.step, "message": message}
        outputs = self._call(event, super().fail, batch, message, now)
        self._write(event, outputs=outputs_record(outputs))
        return outputs

    def adopt(self, prefixes: Sequence[TierPrefix]) -> None:
        event: Event = {"event": "adopt", "prefixes": prefixes_record(prefixes)}
        self._call(event, super().adopt, prefixes)
        self._write(event)

    def stored(self, copy_id: int, pages: int) -> int:
        event: Event = {"event": "stored", "copy": copy_id, "pages": pages}
        result = self._call(event, super().stored, copy_id, pages)
        self._write(event, result=result)
        return result

    def loaded(self, load_id: int, pages: int) -> None:
        event: Event = {"event": "loaded", "load": load_id, "pages": pages}
        self._call(event, super().loaded, load_id, pages)
        self._write(event)

    def change_options(self, **changes: Any) -> None:
        event: Event = {"event": "change_options", "changes": changes}
        self._call(event, super().change_options, **changes)
        self._write(event)

    def flush(self) -> bool:
        event: Event = {"event": "flush"}
        result = self._call(event, super().flush)
        self._write(event, result=result)
        return result

    def close(self) -> None:
        """Ends the trace."""
        self._writer.close()

    def _look_at_grammars(self) -> None:
        # One that has ended may never get ready.
        compiling = [pair for pair in self._latched if pair[0].finish is None]
        for request, grammar in compiling:
            if grammar.refresh():
                self._writer.write({"event": "grammar", "id": request.request_id, "ready": True})
        self._latched = [pair for pair in compiling if not pair[1].ready]

    def _call(self, event: Event, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            # A refusal is a decision, and a bug's last input is what a trace is kept for.
            self._write(event, error=[type(error).__name__, str(error)])
            raise

    def _write(self, event: Event, **decision: Any) -> None:
        self._writer.write({**event, **decision})
