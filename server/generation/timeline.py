"""The moments of a request's life, noted where they happen and read by everybody who tells of them:
timings in answers, the access log, traces, spans, latency metrics.

    received -> tokenized, queued -> admitted -> chunks of its prompt -> first token .. last

Noting costs two attributes for each token. Why it waited is the scheduler's to know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from runtime.request import Request
    from runtime.scheduling.schedule_batch import ScheduleBatch

TIMED_LAPS = 15  # a lap is timed where its number has none of these bits
LONG_LAP_S = 1e-4
MAX_LAPS = 64


class Chunk(NamedTuple):
    """A piece of a prompt: the step that computed it, when that was launched, its tokens."""

    step: int
    launched_s: float
    tokens: int


class Spell(NamedTuple):
    """A stay in the queue, until the request was admitted."""

    since_s: float
    until_s: float


class Laps:
    """Something that is done for a request for every token: how long it takes, of every 16th lap
    that is timed, and when, of the first and of those that took long.

    Attributes: kept: begin and end of such laps, in order.
    """

    __slots__ = ("_count", "_seconds", "kept")

    def __init__(self) -> None:
        self._count = 0
        self._seconds = 0.0
        self.kept: list[tuple[float, float]] = []

    def add(self, begun_s: float, ended_s: float) -> None:
        """One lap is over."""
        lap = ended_s - begun_s
        self._seconds += lap
        if not self._count or (lap > LONG_LAP_S and len(self.kept) < MAX_LAPS):
            self.kept.append((begun_s, ended_s))
        self._count += 1

    @property
    def mean_s(self) -> float:
        return self._seconds / max(1, self._count)


@dataclass(slots=True, eq=False)
class Timeline:
    """One choice. Moments are seconds on the engine's clock, None until they come.

    Args:
        received_s: when the head of the client's request had been read.

    Attributes:
        spells: stays in the queue that are over; a retracted request has several.
        chunks: launched pieces of its prompt, also of one that is computed again.
        queued_s: seconds in the queue before the first token.
        waited_s: at its end, seconds waited by blocking term.
        text: how long making text of tokens took, where that is noted (see `Delivery.timed`).
        tokens: at its end, tokens delivered.
        finish: how it ended.
    """

    request: Request
    received_s: float
    spells: list[Spell] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    queued_s: float = 0.0
    text: Laps = field(default_factory=Laps)
    waited_s: Mapping[str, float] = field(default_factory=dict)
    tokens: int = 0
    finish: str = "error"

    @property
    def arrival_s(self) -> float:
        """When it was tokenized and began to wait for its turn."""
        return self.request.arrival_s

    @property
    def admitted_s(self) -> float | None:
        """When it first left the queue."""
        return self.spells[0].until_s if self.spells else None

    def launched(self, batch: ScheduleBatch, row: int, now: float) -> None:
        """A step with a piece of its prompt was launched."""
        record = self.request.scheduling
        if record.started_s is not None and record.admissions > len(self.spells):
            self.spells.append(Spell(record.waiting_since_s, record.started_s))
        self.chunks.append(Chunk(batch.step, now, batch.extend_lens[row]))

    def end(self, now: float, tokens: int, waited_s: Mapping[str, float]) -> None:
        """Nobody waits for it any more."""
        self.ended_s, self.tokens, self.waited_s = now, tokens, waited_s
        if self.first_token_s is None:
            self.queued_s = sum(waited_s.values())


@dataclass(frozen=True, slots=True)
class Timings:
    """What a client is told of a request's time. Seconds; None where it did not get so far.

    tokenize_s + queued_s + prefill_s = first_token_s, and decode_s more to the last token. Of
    several choices the longest times, and counts in all.

    Args:
        tokenize_s: reading the body, rendering and tokenizing the prompt.
        queued_s: in the queue, before the first token.
        prefill_s: out of the queue, until the first token.
        first_token_s: from the request's arrival.
        decode_s: from the first token to the last, with any wait after a retraction.
        total_s: from the request's arrival to its last token, or to its end without one.
        prefill_chunks: pieces that the prompt was computed in.
        cached_tokens: prompt tokens found in the prefix cache.
        retractions: times that it had to give its KV back.
        waited_s: seconds by what it waited for.
    """

    tokenize_s: float
    queued_s: float
    prefill_s: float | None
    first_token_s: float | None
    decode_s: float | None
    total_s: float
    prefill_chunks: int
    cached_tokens: int
    retractions: int
    waited_s: Mapping[str, float]


def timings(timelines: Sequence[Timeline], cached_tokens: int, now: float) -> Timings:
    """What is told of the choices of one request. now: the end of those that go on."""
    prefill, first, decode, total = [], [], [], []
    for one in timelines:
        ended_s = now if one.ended_s is None else one.ended_s
        if one.first_token_s is None or one.last_token_s is None:
            total.append(ended_s - one.received_s)
            continue
        first.append(one.first_token_s - one.received_s)
        prefill.append(max(0.0, one.first_token_s - one.arrival_s - one.queued_s))
        decode.append(one.last_token_s - one.first_token_s)
        total.append(one.last_token_s - one.received_s)
    return Timings(
        tokenize_s=_seconds(max(one.arrival_s - one.received_s for one in timelines)),
        queued_s=_seconds(max(one.queued_s for one in timelines)),
        prefill_s=_longest(prefill),
        first_token_s=_longest(first),
        decode_s=_longest(decode),
        total_s=_seconds(max(total)),
        prefill_chunks=sum(len(one.chunks) for one in timelines),
        cached_tokens=cached_tokens,
        retractions=sum(one.request.retractions for one in timelines),
        waited_s=_longest_by_term(one.waited_s for one in timelines),
    )


def _longest(seconds: Sequence[float]) -> float | None:
    return _seconds(max(seconds)) if seconds else None


def _longest_by_term(waits: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for waited in waits:
        for term, seconds in waited.items():
            found[term] = max(found.get(term, 0.0), _seconds(seconds))
    return found


def _seconds(value: float) -> float:
    """In whole microseconds."""
    return round(value, 6)
