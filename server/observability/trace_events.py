"""Steps and requests as events of the Trace Event Format, which Perfetto and Chrome show.

Every event is a complete one ("X": begin and duration in microseconds). Lanes of the first process
are the event loop and the device; of the second process, the requests, each in a lane that is free
for as long as it takes. Within a lane, events come in the order of their begin, and none is cut by
the end of another.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from server.generation.timeline import Spell

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from server.generation.step_records import StepRecord
    from server.generation.timeline import Timeline
    from server.observability.request_report import RequestReport

SERVER, REQUESTS = 1, 2  # processes
LOOP, DEVICE = 1, 2  # lanes of the server's
# Steps whose time on the device is remembered, for the requests that were computed in them.
_KEPT_STEPS = 8192

Event = bytes  # an element of the array


class Slice(NamedTuple):
    """Something that took a while."""

    name: str
    begin_s: float
    end_s: float
    args: Mapping[str, Any] = {}


class TraceEvents:
    """Makes events; not thread-safe. Each method gives events that follow those given before."""

    def __init__(self) -> None:
        self._loop: list[Slice] = []  # not given yet: the next step was planned before they ended
        self._device_end_s = 0.0
        self._steps: dict[int, tuple[float, float]] = {}
        self._lanes: list[float] = []  # of requests: when each gets free

    def begin(self) -> Iterator[Event]:
        """Names of processes and of the server's lanes."""
        yield _name("process_name", SERVER, 0, "server")
        yield _name("process_name", REQUESTS, 0, "requests")
        yield _name("thread_name", SERVER, LOOP, "event loop")
        yield _name("thread_name", SERVER, DEVICE, "device")

    def step(self, record: StepRecord) -> Iterator[Event]:
        """A step. They come in the order of their commits."""
        yield self._on_device(record)
        told = {"step": record.step}
        moments = (
            ("plan", record.planned_s, record.launched_s),
            ("launch", record.launched_s, record.sent_s),
            ("commit", record.done_s, record.applied_s),
            ("deliver", record.applied_s, record.committed_s),
        )
        self._loop += [Slice(name, begin, end, told) for name, begin, end in moments]
        yield from self._loop_until(record.sent_s)

    def _on_device(self, record: StepRecord) -> Event:
        begin_s = max(record.ended_s - record.device_s, record.launched_s, self._device_end_s)
        end_s = self._device_end_s = max(begin_s, record.ended_s)
        self._steps[record.step] = (begin_s, end_s)
        if len(self._steps) > _KEPT_STEPS:
            del self._steps[next(iter(self._steps))]
        told: dict[str, Any] = {
            "step": record.step,
            "prefill_tokens": record.prefill_tokens,
            "prefill_rows": record.prefill_rows,
            "decode_rows": record.decode_rows,
            "masked_rows": record.masked_rows,
        }
        if record.idle_s is not None:
            told["idle_us"] = _microseconds(record.idle_s)
        if record.queueing_s:
            told["queueing_us"] = _microseconds(record.queueing_s)
        if record.failed is not None:
            told["failed"] = record.failed
        return _event(Slice(record.kind, begin_s, end_s, told), SERVER, DEVICE)

    def _loop_until(self, now_s: float) -> Iterator[Event]:
        """The events of the event loop that began by `now_s`: whatever comes later begins later."""
        self._loop.sort(key=attrgetter("begin_s"))
        ready = [one for one in self._loop if one.begin_s <= now_s]
        self._loop = self._loop[len(ready) :]
        return (_event(one, SERVER, LOOP) for one in ready)

    def request(self, report: RequestReport) -> Iterator[Event]:
        """A request, a lane for each choice. They come in the order of their ends."""
        for choice in report.choices:
            lane = self._lane(report.received_s, report.ended_s)
            if lane == len(self._lanes):
                yield _name("thread_name", REQUESTS, lane, f"requests {lane}")
            for one in nested(self._request(report, choice)):
                yield _event(one, REQUESTS, lane)

    def _lane(self, begin_s: float, end_s: float) -> int:
        """A lane that is free from `begin_s` on, from 1."""
        for index, free_s in enumerate(self._lanes):
            if free_s <= begin_s:
                self._lanes[index] = end_s
                return index + 1
        self._lanes.append(end_s)
        return len(self._lanes)

    def _request(self, report: RequestReport, choice: Timeline) -> Iterator[Slice]:
        whole = {
            "request_id": report.request_id,
            "path": report.path,
            "status": report.status,
            "finish": choice.finish,
            "tokens": choice.tokens,
            "cached_tokens": choice.request.cached_tokens,
            "retractions": choice.request.retractions,
            "queued_s": choice.queued_s,
        }
        name = choice.request.request_id
        yield Slice(name, report.received_s, report.ended_s, whole)
        yield Slice("tokenize", report.received_s, choice.arrival_s)
        yield from _waits(report, choice)
        yield from self._chunks(choice)
        if choice.first_token_s is not None and choice.last_token_s is not None:
            told = {
                "tokens": choice.tokens,
                "detokenize_us": _microseconds(choice.text.mean_s),
                "write_us": _microseconds(report.writes.mean_s),
            }
            yield Slice("decode", choice.first_token_s, choice.last_token_s, told)
        for begin_s, end_s in choice.text.kept:
            yield Slice("detokenize", begin_s, end_s)
        if choice is report.choices[0]:  # an answer's bytes hold every choice
            for begin_s, end_s in report.writes.kept:
                yield Slice("write", begin_s, end_s)

    def _chunks(self, choice: Timeline) -> Iterator[Slice]:
        """Pieces of the prompt, when the device computed them. Steps that are not known here are
        left out: they are not over, or lie before the trace."""
        for chunk in choice.chunks:
            if chunk.step in self._steps:
                begin_s, end_s = self._steps[chunk.step]
                yield Slice("prefill", begin_s, end_s, {"step": chunk.step, "tokens": chunk.tokens})

    def end(self) -> Iterator[Event]:
        """What was held back."""
        return self._loop_until(float("inf"))


def _waits(report: RequestReport, choice: Timeline) -> Iterator[Slice]:
    """Stays in the queue. Of the only one, what was waited for is laid out in turn: its sums are
    known, not their order."""
    spells = list(choice.spells)
    if not spells and choice.request.row < 0:  # still there, or it ended there
        ended_s = report.ended_s if choice.ended_s is None else choice.ended_s
        spells = [Spell(choice.arrival_s, ended_s)]
    for begin_s, end_s in spells:
        yield Slice("queued", begin_s, end_s, {"waited_s": choice.waited_s})
    if len(spells) == 1:
        begin_s, end_s = spells[0]
        for term, seconds in choice.waited_s.items():
            yield Slice(f"waiting: {term}", begin_s, min(begin_s + seconds, end_s))
            begin_s = min(begin_s + seconds, end_s)


def nested(slices: Iterable[Slice]) -> Iterator[Slice]:
    """Slices by their begin, outer ones first. What would reach beyond the one around it is cut at
    its end: a lane cannot show it otherwise."""
    around: list[Slice] = []
    for one in sorted(slices, key=lambda one: (one.begin_s, -one.end_s)):
        while around and around[-1].end_s <= one.begin_s:
            around.pop()
        if around and around[-1].end_s < one.end_s:
            one = Slice(one.name, one.begin_s, around[-1].end_s, one.args)
        yield one
        around.append(one)


def lines(events: Iterable[Event]) -> bytes:
    """Elements of a JSON array, each with the comma that follows it."""
    return b"".join([event + b",\n" for event in events])


def left_out(count: int) -> Event:
    """Says how many steps and requests are missing."""
    labels = f"{count} records left out" if count else "complete"
    return _metadata("process_labels", SERVER, 0, {"labels": labels})


def _name(kind: str, process: int, lane: int, name: str) -> Event:
    return _metadata(kind, process, lane, {"name": name})


def _metadata(kind: str, process: int, lane: int, args: dict[str, str]) -> Event:
    told = {"name": kind, "ph": "M", "ts": 0, "pid": process, "tid": lane, "args": args}
    return orjson.dumps(told)


def _event(one: Slice, process: int, lane: int) -> Event:
    """Formatted by hand: four for each step."""
    begin = 1e6 * one.begin_s
    return b'{"name":%b,"ph":"X","ts":%.3f,"dur":%.3f,"pid":%d,"tid":%d,"args":%b}' % (
        orjson.dumps(one.name),
        begin,
        max(0.0, 1e6 * one.end_s - begin),
        process,
        lane,
        orjson.dumps(one.args),
    )


def _microseconds(seconds: float) -> float:
    """To the nanosecond."""
    return round(1e6 * seconds, 3)
