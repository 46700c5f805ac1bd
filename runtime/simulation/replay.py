"""Re-runs a recorded scheduler on its recorded inputs and compares every decision."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runtime.errors import LoomserveError
from runtime.request import Request
from runtime.runner import StepOutput
from runtime.simulation.recorder import RecordingScheduler
from runtime.simulation.trace import (
    Event,
    Trace,
    finish_from,
    ids_from,
    pins_from,
    prefixes_from,
    sampling_from,
    to_line,
)

if TYPE_CHECKING:
    from runtime.config import SchedulerConfig
    from runtime.scheduling.schedule_batch import ScheduleBatch


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision that came out otherwise.

    Args:
        line: of the trace file. step: the step that was planned or committed, or the next one.
        field: path inside the event, as in "batch.extend_lens[3]".
    """

    line: int
    event: str
    step: int
    field: str
    expected: Any
    got: Any

    def __str__(self) -> str:
        return (
            f"line {self.line}, {self.event} at step {self.step}, {self.field}:"
            f" expected {self.expected!r}, got {self.got!r}"
        )


@dataclass(slots=True)
class ReplayReport:
    """What was compared until the end, or until the first difference."""

    events: int = 0
    steps: int = 0
    difference: Difference | None = None


def replay(trace: Trace, config: SchedulerConfig) -> ReplayReport:
    """Feeds the trace's inputs to a fresh scheduler, up to the first decision that differs.

    It is a recording one, so both sides are spelled by the same code and "the same" means the same
    bytes."""
    run = _Replay(config)
    report = ReplayReport()
    pending: list[tuple[int, Event]] = []
    for line, event in trace.events:
        if event["event"] == "grammar":
            # Seen, and written down, by the call that follows; but version 1 also wrote down those
            # of requests that had ended or were refused.
            if run.grammar_is_ready(event["id"]):
                pending.append((line, event))
            continue
        pending.append((line, event))
        emitted = run.feed(event)
        step = _step_of(event, report.steps)
        report.difference = _compare(pending, emitted, step)
        if report.difference is not None:
            return report
        report.events += len(pending)
        report.steps += event["event"] == "plan" and event.get("batch") is not None
        pending.clear()
    return report


@dataclass(slots=True)
class _ReplayedGrammar:
    ready: bool


class _Replay:
    """Turns events into calls and collects what the recorder writes about them."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._grammars: dict[str, tuple[Request, _ReplayedGrammar]] = {}
        self._emitted: list[Event] = []
        self._scheduler = RecordingScheduler(config, self)
        self._launched: dict[int, ScheduleBatch] = {}

    def write(self, event: Event) -> None:
        self._emitted.append(event)

    def close(self) -> None:
        """Nothing to close: the events stay in memory."""

    def feed(self, event: Event) -> list[Event]:
        """Makes the event's call. Returns: the events that came of it."""
        self._emitted = []
        try:
            self._call(event)
        except Exception:
            # What the recorder wrote about the error is compared like any decision; an error
            # outside a recorded call is a fault of the trace or of the replay.
            if not self._emitted or "error" not in self._emitted[-1]:
                raise
        return self._emitted

    def grammar_is_ready(self, request_id: str) -> bool:
        """Makes a request's grammar ready; whether the request still waits for it."""
        if request_id not in self._grammars:
            return False
        request, grammar = self._grammars[request_id]
        grammar.ready = True
        return request.finish is None

    def _call(self, event: Event) -> None:
        scheduler, kind = self._scheduler, event["event"]
        if kind == "add":
            self._add([event["request"]], event["now"])
        elif kind == "add_group":
            self._add(event["requests"], event["now"])
        elif kind == "abort":
            scheduler.abort(event["id"], event["message"])
        elif kind == "abort_all":
            scheduler.abort_all(event["message"])
        elif kind == "finish":
            scheduler.finish(event["id"], finish_from(event["finish"]))
        elif kind == "plan":
            batch = scheduler.plan(event["now"]).batch
            if batch is not None:
                self._launched[batch.step] = batch
        elif kind == "commit":
            failed = {int(index): reason for index, reason in event["failed"].items()}
            output = StepOutput(event["tokens"], failed=failed, device_s=event["device_s"])
            scheduler.commit(self._launched.pop(event["step"]), output, event["now"])
        elif kind == "fail":
            batch = self._launched[event["step"]]
            self._launched.clear()  # the later ones are taken back with it
            scheduler.fail(batch, event["message"], event["now"])
        elif kind == "adopt":
            scheduler.adopt(prefixes_from(event["prefixes"]))
        elif kind == "stored":
            scheduler.stored(event["copy"], event["pages"])
        elif kind == "loaded":
            scheduler.loaded(event["load"], event["pages"])
        elif kind == "change_options":
            scheduler.change_options(**event["changes"])
        elif kind == "flush":
            scheduler.flush()
        else:
            raise LoomserveError(f"trace event {kind!r}: not known to this version")

    def _add(self, records: list[dict[str, Any]], now: float) -> None:
        requests = [_request(record) for record in records]
        grammars = [(request, request.grammar) for request in requests]
        self._scheduler.add_group(requests, now)
        for request, grammar in grammars:
            if isinstance(grammar, _ReplayedGrammar):
                self._grammars[request.request_id] = request, grammar


def _request(record: dict[str, Any]) -> Request:
    grammar = record["grammar"]
    return Request(
        request_id=record["id"],
        input_ids=ids_from(record["input_ids"]),
        sampling=sampling_from(record["sampling"]),
        arrival_s=record["arrival_s"],
        priority=record["priority"],
        namespace=record["namespace"],
        deadline_s=record["deadline_s"],
        grammar=None if grammar is None else _ReplayedGrammar(grammar),
        pins=pins_from(record),
    )


def _step_of(event: Event, steps: int) -> int:
    batch = event.get("batch")
    return int(batch["step"] if batch else event.get("step", steps))


def _compare(
    expected: list[tuple[int, Event]], emitted: list[Event], step: int
) -> Difference | None:
    for (line, event), got in zip(expected, emitted, strict=False):
        if to_line(event) != to_line(got):
            # Through JSON once, so that both sides hold the same types.
            field, old, new = _first_difference(event, json.loads(to_line(got)), "")
            return Difference(line, event["event"], step, field, old, new)
    if len(expected) != len(emitted):
        line, event = expected[-1]
        old_kinds = [event["event"] for _, event in expected]
        new_kinds = [event["event"] for event in emitted]
        return Difference(line, event["event"], step, "event", old_kinds, new_kinds)
    return None


def _first_difference(expected: Any, got: Any, path: str) -> tuple[str, Any, Any]:
    """Path and both values at the first place, in the order of writing, where two events differ."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for name in [*expected, *(name for name in got if name not in expected)]:
            if expected.get(name) != got.get(name):
                inner = f"{path}.{name}" if path else name
                return _first_difference(expected.get(name), got.get(name), inner)
    if isinstance(expected, list) and isinstance(got, list):
        for index, (old, new) in enumerate(zip(expected, got, strict=False)):
            if old != new:
                return _first_difference(old, new, f"{path}[{index}]")
        return f"len({path})", len(expected), len(got)
    return path, expected, got
