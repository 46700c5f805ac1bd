"""A recorded live run as something to simulate again: arrivals, step times, what clients saw."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runtime.request import FinishReason
from runtime.simulation.cost_fit import StepTime
from runtime.simulation.cost_model import StepWork
from runtime.simulation.simulator import RequestStats
from runtime.simulation.trace import finish_from, ids_from, pins_from
from runtime.simulation.workloads import Arrival

if TYPE_CHECKING:
    from runtime.simulation.trace import Event, Trace


@dataclass(slots=True)
class LiveRun:
    """What a trace tells beside the decisions.

    Args:
        arrivals: the accepted requests, times counted from the first one.
        stats: by request id, on the same time axis, as the clients of the live run saw it.
        step_times: work and device time of every committed step.
    """

    arrivals: list[Arrival] = field(default_factory=list)
    stats: dict[str, RequestStats] = field(default_factory=dict)
    step_times: list[StepTime] = field(default_factory=list)


def read_live_run(trace: Trace) -> LiveRun:
    """Reads arrivals and what became of them out of the events.

    A request that ended by a stop or at its length ends at the same token in a simulation; one
    that was aborted is aborted as long after its arrival, if it still runs then; one that timed
    out or failed runs to its length."""
    reader = _Reader()
    for _, event in trace.events:
        reader.read(event)
    return reader.finished()


class _Reader:
    def __init__(self) -> None:
        self._run = LiveRun()
        self._origin_s = 0.0
        self._now_s = 0.0  # calls without a clock reading happen at the last one
        self._arrivals: dict[str, Arrival] = {}
        self._works: dict[int, StepWork] = {}
        self._aborts: dict[str, float] = {}

    def read(self, event: Event) -> None:
        kind = event["event"]
        self._now_s = event.get("now", self._now_s)
        if kind == "add" and "error" not in event:
            self._add(event["request"])
        elif kind == "add_group" and "error" not in event:
            for request in event["requests"]:
                self._add(request)
        elif kind == "abort" and event.get("result"):
            self._aborts.setdefault(event["id"], self._now_s)
        elif kind == "abort_all":
            for request_id in self._arrivals:
                if self._run.stats[request_id].finish is None:
                    self._aborts.setdefault(request_id, self._now_s)
        elif kind == "plan" and event.get("batch"):
            self._works[event["batch"]["step"]] = _work(event["batch"])
        elif kind == "commit":
            work = self._works.pop(event["step"])
            self._run.step_times.append(StepTime(work, event["device_s"]))
        for request_id, tokens, finish in event.get("outputs") or event.get("ended") or ():
            self._output(request_id, tokens, finish)

    def finished(self) -> LiveRun:
        for request_id, arrival in self._arrivals.items():
            finish = self._run.stats[request_id].finish
            given = max(len(arrival.output_ids or ()), 1)
            if finish is not None and finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
                arrival.output_tokens = given
            else:
                arrival.output_tokens = arrival.max_new_tokens or given
            if request_id in self._aborts:
                arrival.abort_after_s = (
                    self._aborts[request_id] - self._origin_s - arrival.arrival_s
                )
        self._run.arrivals = list(self._arrivals.values())
        return self._run

    def _add(self, request: dict[str, Any]) -> None:
        if not self._arrivals:
            self._origin_s = self._now_s
        arrival = Arrival(
            arrival_s=self._now_s - self._origin_s,
            input_ids=ids_from(request["input_ids"]),
            output_tokens=0,
            max_new_tokens=request["sampling"].get("max_new_tokens"),
            request_id=request["id"],
            priority=request["priority"],
            namespace=request["namespace"],
            ignore_eos=request["sampling"].get("ignore_eos", False),
            output_ids=ids_from([]),
            pins=pins_from(request),
        )
        self._arrivals[arrival.request_id] = arrival
        self._run.stats[arrival.request_id] = RequestStats(
            arrival.request_id, arrival.arrival_s, len(arrival.input_ids)
        )

    def _output(self, request_id: str, tokens: list[int], finish: list[Any] | None) -> None:
        stats, now_s = self._run.stats[request_id], self._now_s - self._origin_s
        if tokens:
            if stats.tokens:
                stats.longest_gap_s = max(stats.longest_gap_s, now_s - stats.last_s)
            else:
                stats.first_s = now_s
            stats.tokens += len(tokens)
            stats.last_s = now_s
            known = self._arrivals[request_id].output_ids
            if known is not None:
                known.extend(tokens)
        if finish is not None:
            stats.finish = finish_from(finish)


def _work(batch: dict[str, Any]) -> StepWork:
    prefill = batch["num_prefill"]
    starts, lengths = batch["prefix_lens"], batch["extend_lens"]
    pairs = sum(
        n * s + n * (n + 1) // 2 for s, n in zip(starts[:prefill], lengths[:prefill], strict=True)
    )
    decode = len(starts) - prefill
    return StepWork(sum(lengths[:prefill]), pairs, decode, sum(starts[prefill:]) + decode)
