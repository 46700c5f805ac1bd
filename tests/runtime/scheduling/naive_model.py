"""What must hold of a scheduler after every step.

Written from the rules, not from the scheduler: it follows every call from outside, by the tokens of
requests and the launched batches. The recount of pages and rows is `NaiveBooks`, pins are
`NaivePins`, recurrent states `NaiveStates`.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from runtime.request import FinishReason, Request
from runtime.runner import StepOutput
from runtime.scheduling.schedule_batch import ScheduleBatch
from runtime.scheduling.scheduler import Scheduler
from tests.runtime.scheduling.fake_device import FakeDevice
from tests.runtime.scheduling.naive_books import NaiveBooks
from tests.runtime.scheduling.naive_pins import NaivePins
from tests.runtime.scheduling.naive_states import NaiveStates


@dataclass
class Life:
    """A request as seen from outside."""

    request: Request
    order: int
    launched: int = 0  # tokens sampled by launched steps since the last retraction
    decoding: bool = False  # a launched step has completed its prompt
    cut: bool = False  # a launched step has computed part of its prompt, none the end of it
    retractions: int = 0
    ending: bool = False
    ended: bool = False
    outputs_before: int = 0  # tokens that it had when it last started
    # What it had read of others when it gave NaN, until it is known whose fault that was.
    suspects: dict[int, Any] | None = None
    starts_anew: bool = False  # as soon as no launched step names it

    @property
    def progress(self) -> tuple[int, bool, bool]:
        """What a step that is taken back changes."""
        return self.launched, self.decoding, self.cut

    @progress.setter
    def progress(self, before: tuple[int, bool, bool]) -> None:
        self.launched, self.decoding, self.cut = before


class NaiveModel:
    """Follows every call and checks every rule.

    Args:
        scheduler: what is checked.
        device: what it schedules for.
        mixing: mixed steps are on.
        cache: prefixes are reused.

    Attributes:
        cleared: requests that turned out to have read NaN.
    """

    def __init__(
        self, scheduler: Scheduler, device: FakeDevice, *, mixing: bool, cache: bool
    ) -> None:
        self.scheduler = scheduler
        self.device = device
        self.mixing = mixing
        self.cache = cache
        self.books = NaiveBooks(scheduler, device)
        self.pins = NaivePins(self.books)
        self.states = NaiveStates(self.books)
        self.lives: dict[str, Life] = {}
        self.cleared = 0
        self._owed: dict[str, tuple[Any, ...]] = {}  # rows to be tried again
        self._preemptions = 0

    def added(self, request: Request) -> None:
        self.lives[request.request_id] = Life(request, len(self.lives))
        self.books.requests.append(request)

    def marked(self, request_id: str) -> None:
        """An abort or a text finish was accepted."""
        self.lives[request_id].ending = True

    def planned(self, batch: ScheduleBatch | None, admitted_before: set[str]) -> None:
        """A pass is over.

        Args:
            admitted_before: ids of requests that held a table row before the pass.
        """
        if self._check_retractions(admitted_before):
            assert batch is not None, "preempted for nobody"
            threshold = self.scheduler.config.priority_preemption_threshold
            started = [r for r in batch.requests if r.request_id not in admitted_before]
            lowest = min(self.lives[name].request.priority for name in admitted_before)
            gap = max([r.priority for r in started], default=lowest) - lowest
            assert gap > threshold, "preempted for somebody who does not start"
        self._look_at_ends()
        self.books.look_at_loads()
        self.pins.check_evictions()
        if batch is None:
            return
        if batch.retry:
            self._check_retry(batch)
        else:
            assert not any(self._goes_on(name) for name in self._owed), "planned before a retry"
            self._owed.clear()
            self._check_order(batch)
        before = {name: life.progress for name, life in self.lives.items()}
        prompts = batch.requests[: batch.num_prefill]
        started = [made for made in prompts if not self.lives[made.request_id].cut]
        alone = [life.request for life in self.lives.values() if life.suspects is not None]
        self.states.look_at(batch, started, alone)
        self._follow(batch)
        self.books.launch(batch, before)

    def commit(self, commit: Callable[[], StepOutput], now: float = 0.0) -> None:
        """Has the oldest step in flight committed, and looks at who must start anew for it.

        Args: commit: does it, and returns what the step gave.
        """
        flight = self.books.launched.pop(0)
        batch = flight.batch
        prompts = [self.lives[batch.requests[b].request_id] for b in batch.sampled]
        del prompts[self._prompts_in(batch) :]
        cached = self.books.cached_pages()
        borrowed = [self.device.written_by_others(batch, b) for b in batch.sampled]
        due = [not (life.ended or life.ending or life.starts_anew) for life in prompts]
        heads = self.books.heads() if self.pins.kept else {}
        failed = commit().failed
        self.pins.shorten(heads)
        self._keep_prompts(batch, failed, now)
        for request in batch.requests:
            self._owed.pop(request.request_id, None)
        self._look_at_ends()
        for i, life in enumerate(prompts):
            if due[i]:
                self._judge(life, borrowed[i], gave_none=i in failed)
        self._look_for_losses(cached - self.books.cached_pages())

    def _keep_prompts(self, batch: ScheduleBatch, failed: Container[int], now: float) -> None:
        """Prompts that were completed are kept as they ask: those that are still wanted, that were
        not dropped with a row that gave NaN, and that do not start anew."""
        for index, b in enumerate(batch.sampled[: self._prompts_in(batch)]):
            life = self.lives[batch.requests[b].request_id]
            if not (index in failed or life.ended or life.ending or life.starts_anew):
                end = batch.prefix_lens[b] + batch.extend_lens[b]
                self.pins.keep_prompt(life.request, end, now)

    def _prompts_in(self, batch: ScheduleBatch) -> int:
        """How many prompts a step completes: its first sampled rows."""
        return sum(b < batch.num_prefill for b in batch.sampled)

    def _judge(self, life: Life, borrowed: dict[int, Any], *, gave_none: bool) -> None:
        """A prompt is complete. Args: borrowed: what it has read that others have computed."""
        assert life.suspects is None or not borrowed, "it is not isolated"
        if not gave_none:
            if life.suspects is not None:
                self.cleared += self.device.reveal_nan(life.suspects)
                life.suspects = None
        elif life.ended:
            assert not borrowed, "it ended by what others had computed"
        else:
            assert life.suspects is None, "it is retried a second time"
            life.suspects = borrowed
            self._starts_anew(life)

    def _look_for_losses(self, lost: set[int]) -> None:
        """Who holds what has left the cache starts anew. It has had no tokens from it, but for one
        that may be older than the last of what it holds."""
        for life in self.lives.values():
            request = life.request
            if request.retractions > life.retractions or lost.intersection(request.pages):
                tokens = len(request.output_ids) - life.outputs_before
                assert tokens < 2 or life.ended, "who has had tokens must start anew"
                self._starts_anew(life)
        self._owed = {name: row for name, row in self._owed.items() if self._goes_on(name)}

    def _starts_anew(self, life: Life) -> None:
        life.starts_anew = not life.ended
        life.progress = (0, False, False)
        for flight in self.books.launched:  # also if this one fails
            flight.before[life.request.request_id] = life.progress

    def failed(self) -> None:
        """Every step in flight is taken back, and the oldest is to be tried again."""
        self.pins.shorten(self.books.heads())
        flight = self.books.launched[0]
        for name, life in self.lives.items():
            life.progress = flight.before.get(name, (0, False, False))
        requests = flight.batch.requests
        rows = rows_of(flight.batch)
        if len(requests) > 1:
            self._owed.update(zip([r.request_id for r in requests], rows, strict=True))
        else:
            self._owed.pop(requests[0].request_id, None)
        self.books.launched.clear()
        self._look_at_ends()
        self._owed = {name: row for name, row in self._owed.items() if self._goes_on(name)}

    def _look_at_ends(self) -> None:
        for life in self.lives.values():
            life.ended = life.request.finish is not None

    def _goes_on(self, name: str) -> bool:
        return not self.lives[name].ended and self.lives[name].request.row >= 0

    def _check_retry(self, batch: ScheduleBatch) -> None:
        """Rows of a failed step come again as they were, and nothing else is in flight."""
        assert not self.books.launched
        for request, row in zip(batch.requests, rows_of(batch), strict=True):
            assert self._owed[request.request_id] == row

    def _check_retractions(self, admitted_before: set[str]) -> bool:
        """Returns: whether somebody was preempted."""
        preempted = self.scheduler.counters.preemptions > self._preemptions
        self._preemptions = self.scheduler.counters.preemptions
        oldest = min((self.lives[i].order for i in admitted_before), default=-1)
        for life in self.lives.values():
            if life.request.retractions == life.retractions:
                continue
            assert life.request.retractions == life.retractions + 1
            life.retractions += 1
            named = any(life.request in flight.batch.requests for flight in self.books.launched)
            assert not named, "retracted while a launched step names its slots"
            may = preempted or life.starts_anew or life.order != oldest
            assert may, "the oldest admitted request was retracted"
            life.progress, life.starts_anew = (0, False, False), False
        return preempted

    def _check_order(self, batch: ScheduleBatch) -> None:
        """Without reuse, priorities and arrival alone decide who is admitted under fcfs; but a
        prompt that is computed at once may go ahead while a longer one is being cut."""
        if self.scheduler.config.schedule_policy != "fcfs" or self.cache:
            return
        started = [self.lives[r.request_id] for r in batch.requests[: batch.num_prefill]]
        started = [life for life in started if not life.cut]
        waiting = [
            life
            for life in self.lives.values()
            if life.request.row < 0 and not life.request.finish and not life.request.grammar
        ]
        ahead = self._ahead(batch, started, waiting)
        for new in started:
            for other in waiting if new not in ahead else ():
                older = (-other.request.priority, other.order) < (-new.request.priority, new.order)
                assert not older, f"{new.request.request_id} overtook {other.request.request_id}"

    def _ahead(self, batch: ScheduleBatch, started: list[Life], waiting: list[Life]) -> list[Life]:
        """Who of those that a step starts may have gone ahead of others."""
        cut = [life.request.priority for life in self.lives.values() if life.cut and not life.ended]
        if not self.scheduler.config.prefill_share or not cut:
            return []
        least = max([*cut, *(life.request.priority for life in waiting)])
        whole = [batch.requests[b] for b in batch.sampled if b < batch.num_prefill]
        return [
            life for life in started if life.request in whole and life.request.priority >= least
        ]

    def _follow(self, batch: ScheduleBatch) -> None:
        carried = {request.request_id for request in batch.requests[batch.num_prefill :]}
        for life in self.lives.values():
            request = life.request
            due = life.decoding and life.launched < request.max_new_tokens and not life.ended
            decode_rows_ride = not batch.retry and (self.mixing or not batch.num_prefill)
            if due and decode_rows_ride:
                assert request.request_id in carried, "a running request got no decode row"
            if request.request_id in carried:
                assert due, "a decode row for a request that is not running"
                life.launched += 1
        for b, request in enumerate(batch.requests[: batch.num_prefill]):
            life = self.lives[request.request_id]
            total = len(request.input_ids) + len(request.output_ids)
            end = batch.prefix_lens[b] + batch.extend_lens[b]
            assert batch.extend_lens[b] > 0
            assert end <= total, "prefills past the end of its tokens"
            assert not life.decoding
            if end < total:
                assert b not in batch.sampled
                self._check_cut(life, end)
                self._note_start(life)
                life.cut = True
            else:
                assert b in batch.sampled
                self._note_start(life)
                life.cut, life.decoding = False, True
                life.launched = len(request.output_ids) + 1
        cut = [life for life in self.lives.values() if life.cut and not life.ended]
        assert len(cut) <= 1, "more than one prompt is cut"

    def _note_start(self, life: Life) -> None:
        assert not life.starts_anew, "it goes on over NaN"
        if not life.cut:
            life.outputs_before = len(life.request.output_ids)

    def _check_cut(self, life: Life, end: int) -> None:
        """A prompt is cut at the end of a page, later also inside one; but never where cuts are
        aligned and the alignment says otherwise."""
        align = self.scheduler.config.truncation_align_size
        if align or not life.cut:
            assert end % (align or self.books.page_size) == 0, (
                "a prompt is cut where it must not be"
            )

    def planning(self, now: float) -> None:
        """A pass begins."""
        self.pins.planning(now)

    def check(self) -> None:
        """Every invariant, from scratch."""
        self.books.check()
        self.pins.check()
        self.states.check()


def rows_of(batch: ScheduleBatch) -> list[tuple[Any, ...]]:
    """All that a row of a step is but its page numbers."""
    sampled = {
        b: (batch.sample_positions[i], batch.output_counts[i]) for i, b in enumerate(batch.sampled)
    }
    ends = list(accumulate(batch.extend_lens[: batch.num_prefill], initial=0))
    return [
        (
            batch.rows[b],
            batch.prefix_lens[b],
            batch.extend_lens[b],
            list(batch.input_ids[ends[b] : ends[b + 1]]) if b < batch.num_prefill else None,
            sampled.get(b),
        )
        for b in range(len(batch.requests))
    ]


def expected_tokens(request: Request, tokens: list[int], eos: frozenset[int]) -> tuple[int, str]:
    """(how many of the tokens that the model would sample are the request's, why it ends)."""
    stops = set(request.sampling.stop_token_ids)
    if not request.sampling.ignore_eos:
        stops |= eos
    for count, token in enumerate(tokens[: request.max_new_tokens], 1):
        if token in stops and count > request.sampling.min_tokens:
            return count, FinishReason.STOP.value
    return request.max_new_tokens, FinishReason.LENGTH.value
