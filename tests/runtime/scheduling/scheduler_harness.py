"""Drives a Scheduler by hand against a fake device that keeps a real (fake) KV memory.

`FakeDevice` stores for which tokens the KV in every slot was computed, and runs steps in launch
order, so that each row must read exactly its own history through its table row: aliased pages, pages
freed too early, stale tables and KV that a failed step was to write all show up as wrong content.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.config import SchedulerConfig
from runtime.request import PromptPin, Request, RequestOutput, SamplingParams
from runtime.runner import StepOutput
from runtime.scheduling.kv_tier import PageLoad
from runtime.scheduling.plan import Plan
from runtime.scheduling.schedule_batch import ScheduleBatch
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.write_behind import PageCopy

EOS = 2
NO_NUMBER = "a NaN among the logits"
RUBBISH = 0  # KV by a step that was lost, or by a row that is known to have given no number
NOBODY = ("", 0, -1)  # has computed what was loaded
SPOILT = -1  # KV that is no number either, but nobody knows it yet: who reads it gives no number


def config(**changes: Any) -> SchedulerConfig:
    """A small pool: page size 1, room for 200 tokens beside the reserved page, no EOS."""
    values: dict[str, Any] = {
        "page_size": 1,
        "capacity_tokens": 201,
        "context_length": 4096,
        "max_running_requests": 8,
        "chunked_prefill_size": 64,
    }
    return SchedulerConfig(**{**values, **changes})


def request(
    request_id: str,
    tokens: int | Sequence[int],
    max_new: int | None = 4,
    *,
    arrival_s: float = 0.0,
    priority: int = 0,
    namespace: str = "",
    deadline_s: float | None = None,
    grammar: Any = None,
    pins: tuple[PromptPin, ...] = (),
    **sampling: Any,
) -> Request:
    """A request whose tokens are given, or are made unlike any other request's."""
    if isinstance(tokens, int):
        base = 1000 * (1 + sum(map(ord, request_id)) % 997)
        tokens = [base + i for i in range(tokens)]
    return Request(
        request_id,
        array("i", tokens),
        SamplingParams(max_new_tokens=max_new, **sampling),
        arrival_s,
        priority=priority,
        namespace=namespace,
        deadline_s=deadline_s,
        grammar=grammar,
        pins=pins,
    )


def scripted_token(request_id: str, index: int) -> int:
    """Output token `index` of a request: the same whenever and beside whomever it is sampled."""
    return 100 + (sum(map(ord, request_id)) * 31 + index * 17) % 800


class FakeDevice:
    """Runs batches in launch order; returns scripted tokens.

    A KV slot holds a hash of everything its content depends on: the namespace, and all tokens up to
    its position; or RUBBISH, which nobody may read; or SPOILT.

    Args:
        script: (request id, output index) to the token that is sampled.

    Attributes:
        spoilers: by request id, in which of its admissions it computes no numbers; None: in all.
    """

    def __init__(
        self, page_size: int, rows: int, script: Callable[[str, int], int] = scripted_token
    ) -> None:
        self.page_size = page_size
        self.table: list[dict[int, int]] = [{} for _ in range(rows + 1)]
        self.slots: dict[int, int] = {}
        self.next_tokens: dict[int, int] = {}
        self.script = script
        # What each request's sequence is on the device, result by result.
        self.sampled: dict[str, list[int]] = {}
        self._chains: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        self._traces: dict[int, _Trace] = {}  # by step, of steps that may still be lost
        self.spoilers: dict[str, int | None] = {}
        # Of a slot: request, its how manieth admission, and step.
        self._writer: dict[int, tuple[str, int, int]] = {}
        # Slots that a row has read which then gave a token: they cannot have held rubbish.
        self._sound: set[int] = set()
        self.tier = FakeTier()

    def run(self, batch: ScheduleBatch) -> StepOutput:
        for made in batch.restore:
            self.next_tokens[made.row] = ([-1, *made.output_ids])[-1]
        trace = self._traces[batch.step] = _Trace()
        self._write_table(batch, trace)
        assert len(set(batch.rows)) == len(batch.rows), "two rows of a step share a table row"
        chains = [self._store(batch, b, trace) for b in range(len(batch.requests))]
        spoilt = [self._read(batch, b, chain, trace) for b, chain in enumerate(chains)]
        tokens = [self._sample(batch, i, b) for i, b in enumerate(batch.sampled)]
        failed = {i: NO_NUMBER for i, b in enumerate(batch.sampled) if spoilt[b]}
        return StepOutput(tokens, failed=failed)

    def _write_table(self, batch: ScheduleBatch, trace: _Trace) -> None:
        entries = list(zip(batch.table_rows, batch.table_indices, strict=True))
        assert len(set(entries)) == len(entries), "a table entry is written twice in one step"
        assert 0 not in batch.table_rows
        assert 0 not in batch.table_pages
        for (row, index), page in zip(entries, batch.table_pages, strict=True):
            trace.table.append((row, index, self.table[row].get(index, 0)))
            self.table[row][index] = page

    def _store(self, batch: ScheduleBatch, b: int, trace: _Trace) -> list[int]:
        """Writes a row's new KV; returns what each slot of the row must hold."""
        request, start, length = batch.requests[b], batch.prefix_lens[b], batch.extend_lens[b]
        outputs = self.sampled.setdefault(request.request_id, [])
        history = [*request.input_ids, *outputs][: start + length]
        assert start + length <= len(request.input_ids) + len(outputs)
        if b < batch.num_prefill:
            offset = sum(batch.extend_lens[:b])
            new = list(batch.input_ids[offset : offset + length])
        else:
            assert length == 1
            new = [self.next_tokens[batch.rows[b]]]
        assert new == history[start:], "the step computes other tokens than the request's"
        chain = chain_of(request.namespace, history)
        slots = [self._slot(batch.rows[b], p) for p in range(start, start + length)]
        self.slots.update(zip(slots, chain[start:], strict=True))
        name, admission = request.request_id, request.scheduling.admissions
        if self.spoilers.get(name, -1) in (None, admission):
            self.slots.update(dict.fromkeys(slots, SPOILT))
        self._writer.update(dict.fromkeys(slots, (name, admission, batch.step)))
        self._sound.difference_update(slots)
        trace.written.append(slots)
        return chain

    def _read(self, batch: ScheduleBatch, b: int, chain: list[int], trace: _Trace) -> bool:
        """Returns whether it was no number, and what the row has written is none either."""
        slots = [self._slot(batch.rows[b], position) for position in range(len(chain))]
        trace.read.append(slots)
        found = [self.slots[slot] for slot in slots]
        differs = [position for position in range(len(chain)) if found[position] != chain[position]]
        wrong = [position for position in differs if found[position] != SPOILT]
        assert not wrong, (
            f"step {batch.step}, {batch.requests[b].request_id}: positions {wrong[:8]} hold"
            f" {'rubbish' if found[wrong[0]] == RUBBISH else 'the KV of other tokens'}"
        )
        if differs:
            self.slots.update(dict.fromkeys(trace.written[b], SPOILT))
        return bool(differs)

    def _sample(self, batch: ScheduleBatch, i: int, b: int) -> int:
        request = batch.requests[b]
        outputs = self.sampled[request.request_id]
        index = batch.output_counts[i]
        assert batch.sample_positions[i] == batch.prefix_lens[b] + batch.extend_lens[b]
        assert batch.sample_positions[i] == len(request.input_ids) + index
        del outputs[index:]  # the dropped token of a request that was retracted
        token = self.script(request.request_id, index)
        outputs.append(token)
        self.next_tokens[batch.rows[b]] = token
        return token

    def _slot(self, row: int, position: int) -> int:
        page = self.table[row][position // self.page_size]
        return page * self.page_size + position % self.page_size

    # What goes wrong

    def lose(self, batches: Sequence[ScheduleBatch], *, tables: bool = True) -> None:
        """These steps, all that are in flight, were lost: what they wrote, the newest tokens
        included, is rubbish; and unless `tables`, so is what they were to write into the table."""
        for batch in reversed(batches):
            trace = self._traces.pop(batch.step, None)
            if trace is None:
                continue  # it was never launched
            for slot in [slot for slots in trace.written for slot in slots]:
                self.slots[slot] = RUBBISH
            for row in batch.rows:
                self.next_tokens[row] = -1
            for row, index, before in trace.table if not tables else ():
                self.table[row][index] = before

    def give_no_number(
        self, batch: ScheduleBatch, b: int, later: Sequence[ScheduleBatch]
    ) -> set[str]:
        """What a row has written is rubbish, that of a prompt's earlier chunks included but for what
        others have had tokens from, and so is what later steps in flight have built on that; returns
        whose rows of them."""
        bad = set(self._traces[batch.step].written[b])
        if b < batch.num_prefill:
            made = batch.requests[b]
            run = made.request_id, made.scheduling.admissions
            bad = {slot for slot, writer in self._writer.items() if writer[:2] == run}
            bad -= self._sound
            self.tier.spoil(run)
        self.slots.update(dict.fromkeys(bad, RUBBISH))
        spoilt = set()
        for other in later:
            trace = self._traces.get(other.step, _Trace())  # none where it was never run
            for row, made in enumerate(other.requests[: len(trace.read)]):
                if any(self.slots[slot] == RUBBISH for slot in trace.read[row]):
                    spoilt.add(made.request_id)
                    self.slots.update(dict.fromkeys(trace.written[row], RUBBISH))
        return spoilt

    # The tier below the pool

    def read_page(self, page: int) -> tuple[list[int], set[tuple[str, int]]]:
        """What a page holds, and whose runs wrote it, as far as that may turn out to be rubbish."""
        slots = range(page * self.page_size, (page + 1) * self.page_size)
        doubtful = [slot for slot in slots if slot not in self._sound]
        writers = {self._writer[slot][:2] for slot in doubtful if slot in self._writer}
        return [self.slots.get(slot, 0) for slot in slots], writers

    def write_page(self, page: int, content: Sequence[int]) -> None:
        for at, value in enumerate(content):
            slot = page * self.page_size + at
            self.slots[slot] = value
            self._writer.pop(slot, None)
            self._sound.discard(slot)

    # Whose KV it was

    def gave_numbers(self, batch: ScheduleBatch, rows: Sequence[int]) -> None:
        """These rows of a step gave a token: what they have read was numbers."""
        for b in rows:
            self._sound.update(self._traces[batch.step].read[b])

    def written_by_others(self, batch: ScheduleBatch, b: int) -> dict[int, tuple[str, int, int]]:
        """What a row of a step has read that it had not computed itself since it was admitted: slots
        with their writers."""
        made = batch.requests[b]
        run = made.request_id, made.scheduling.admissions
        read = self._traces[batch.step].read[b]
        writers = {slot: self._writer.get(slot, NOBODY) for slot in read}
        return {slot: writer for slot, writer in writers.items() if writer[:2] != run}

    def condemn(self, writers: dict[int, tuple[str, int, int]]) -> bool:
        """Where these slots still hold what is no number, it is known now; returns whether any do."""
        still = [slot for slot, writer in writers.items() if self._writer.get(slot) == writer]
        known = dict.fromkeys([slot for slot in still if self.slots[slot] == SPOILT], RUBBISH)
        self.slots.update(known)
        return bool(known)

    def has_run(self, batch: ScheduleBatch) -> bool:
        """Whether a step in flight was launched."""
        return batch.step in self._traces

    def chain(self, namespace: str, tokens: tuple[int, ...]) -> list[int]:
        """`chain_of`, remembered."""
        found = self._chains.get((namespace, tokens))
        if found is None:
            found = self._chains[namespace, tokens] = chain_of(namespace, tokens)
        return found

    def done(self, batch: ScheduleBatch) -> None:
        """The step is committed: nothing can take it back."""
        del self._traces[batch.step]


@dataclass
class FakeTier:
    """The tier below the pool: what frames hold, and what is on its way.

    Args:
        frames: by number, the hashes of a page. writers: of a frame, whose runs computed it.
    """

    frames: dict[int, list[int]] = field(default_factory=dict)
    writers: dict[int, set[tuple[str, int]]] = field(default_factory=dict)
    copies: dict[int, PageCopy] = field(default_factory=dict)
    loads: dict[int, PageLoad] = field(default_factory=dict)

    def spoil(self, run: tuple[str, int]) -> None:
        """What this run of a request has written was rubbish from the first."""
        for frame, writers in self.writers.items():
            if run in writers:
                self.frames[frame] = [0]


@dataclass
class _Trace:
    """What a step did: slots per row, and (row, index, page before) of the table."""

    written: list[list[int]] = field(default_factory=list)
    read: list[list[int]] = field(default_factory=list)
    table: list[tuple[int, int, int]] = field(default_factory=list)


def chain_of(namespace: str, tokens: Sequence[int]) -> list[int]:
    """For each position, a hash of the tokens up to it; never 0."""
    chain = []
    value = hash(namespace)
    for token in tokens:
        value = hash((value, token)) or 1
        chain.append(value)
    return chain


class Driver:
    """The engine's loop by hand: plan, launch, and commit one step behind when overlapping.

    Args:
        guilty: whether a step raises for what is in it.
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig | None = None,
        *,
        overlap: bool = True,
        script: Callable[[str, int], int] = scripted_token,
        step_s: float = 0.01,
        checked: bool = True,
        guilty: Callable[[ScheduleBatch], bool] = lambda batch: False,
    ) -> None:
        self.config = scheduler_config or config()
        self.scheduler = Scheduler(self.config)
        self.device = FakeDevice(self.config.page_size, self.config.max_running_requests, script)
        self.overlap = overlap
        self.now = 0.0
        self.step_s = step_s
        self.checked = checked
        self.guilty = guilty
        # The output of a step that was launched, None of one whose launch raised, or which was
        # launched behind such a one.
        self.in_flight: deque[tuple[ScheduleBatch, StepOutput | None]] = deque()
        self.void: dict[int, set[str]] = {}  # by step: whose rows read what was no number
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, RequestOutput] = {}
        self.batches: list[ScheduleBatch] = []

    def add(self, *requests: Request) -> None:
        for item in requests:
            self.collect(self.scheduler.add(item, self.now))
            self.tokens.setdefault(item.request_id, [])

    def plan(self, *, launches: bool = True) -> Plan:
        """One pass; a batch is launched at once.

        Args:
            launches: the launch does not raise.
        """
        plan = self.scheduler.plan(self.now)
        self.collect(plan.ended)
        batch = plan.batch
        if batch is not None:
            self.batches.append(batch)
            output = None
            behind_a_failed = bool(self.in_flight) and self.in_flight[-1][1] is None
            if launches and not behind_a_failed:
                output = self.device.run(batch)
            self.in_flight.append((batch, output))
        self._begin(plan)
        self.verify()
        return plan

    def _begin(self, plan: Plan) -> None:
        """Copies and loads are on their way; until they are done their pages may hold anything."""
        tier = self.device.tier
        for copy in plan.copies:
            tier.copies[copy.copy_id] = copy
        for load in plan.loads:
            tier.loads[load.load_id] = load
            for page in load.pages:
                self.device.write_page(page, [0] * self.config.page_size)

    def finish_copy(self, copy_id: int, pages: int | None = None) -> None:
        """A copy is done. It has read its pages as late as it could.

        Args: pages: how many could be read; None: all.
        """
        tier = self.device.tier
        copy = tier.copies.pop(copy_id)
        count = len(copy.pages) if pages is None else min(pages, len(copy.pages))
        for page, frame in zip(copy.pages[:count], copy.frames, strict=False):
            tier.frames[frame], tier.writers[frame] = self.device.read_page(page)
        self.scheduler.stored(copy_id, count)
        self.verify()

    def finish_load(self, load_id: int, pages: int | None = None) -> None:
        """A load is done; what could not be read is rubbish. Args: as `finish_copy`."""
        tier = self.device.tier
        load = tier.loads.pop(load_id)
        count = len(load.pages) if pages is None else min(pages, len(load.pages))
        for page, frame in zip(load.pages[:count], load.frames, strict=False):
            self.device.write_page(page, tier.frames[frame])
        self.scheduler.loaded(load_id, count)
        self.verify()

    def finish_tier(self) -> None:
        """Whatever is on its way to the tier or from it arrives."""
        for copy_id in list(self.device.tier.copies):
            self.finish_copy(copy_id)
        for load_id in list(self.device.tier.loads):
            self.finish_load(load_id)

    def commit(self, failed: Sequence[int] = ()) -> list[RequestOutput]:
        """Commits the oldest step in flight.

        Args:
            failed: of its sampled rows, those that give no token.
        """
        batch, output = self.in_flight.popleft()
        assert output is not None, "its launch raised"
        void = self.void.pop(batch.step, set())
        later = [other for other, _ in self.in_flight]
        output.failed.update(dict.fromkeys(failed, NO_NUMBER))
        self.device.gave_numbers(
            batch,
            [
                b
                for i, b in enumerate(batch.sampled)
                if i not in output.failed and batch.requests[b].request_id not in void
            ],
        )
        for index in output.failed:
            spoilt = self.device.give_no_number(batch, batch.sampled[index], later)
            for other in later:
                self.void.setdefault(other.step, set()).update(spoilt)
        outputs = self.scheduler.commit(batch, output, self.now)
        self.device.done(batch)
        for news in outputs:
            assert not news.token_ids or news.request.request_id not in void, "a token of rubbish"
        self.collect(outputs)
        self.verify()
        return outputs

    def fail(self, *, tables: bool = True) -> list[RequestOutput]:
        """Fails the oldest step in flight; the device is lost with it.

        Args:
            tables: what the lost steps wrote into the block table is there.
        """
        batches = [batch for batch, _ in self.in_flight]
        self.in_flight.clear()
        self.void.clear()
        self.device.lose(batches, tables=tables)
        outputs = self.scheduler.fail(batches[0], "the step failed", self.now)
        assert len(outputs) <= 1
        assert not outputs or len(batches[0].requests) == 1, "ended, though others were beside it"
        self.collect(outputs)
        self.verify()
        return outputs

    def settle(self) -> list[RequestOutput]:
        """Commits the oldest step in flight, or fails it."""
        batch, output = self.in_flight[0]
        return self.fail() if output is None or self.guilty(batch) else self.commit()

    def step(self) -> Plan:
        """One turn of the loop: plan and launch, then commit what is due."""
        plan = self.plan()
        keep = 1 if self.overlap and plan.batch is not None else 0
        while len(self.in_flight) > keep:
            self.settle()
        self.finish_tier()
        self.now += self.step_s
        return plan

    def run(self, turns: int = 10_000) -> Driver:
        """Turns the loop until nothing is left."""
        for _ in range(turns):
            if not self.scheduler.has_unfinished:
                return self
            self.step()
        raise AssertionError(f"not done after {turns} turns: {self.scheduler.statistics()}")

    def verify(self) -> None:
        if self.checked:
            self.scheduler.check()

    def collect(self, outputs: list[RequestOutput]) -> None:
        for news in outputs:
            name = news.request.request_id
            assert name not in self.ended, f"{name} has news after its end"
            self.tokens.setdefault(name, []).extend(news.token_ids)
            if news.finish is not None:
                self.ended[name] = news

    def reason(self, request_id: str) -> str:
        """How a request ended."""
        finish = self.ended[request_id].finish
        assert finish is not None
        return finish.reason.value

    def reason_or_none(self, request_id: str) -> str | None:
        return self.reason(request_id) if request_id in self.ended else None

    def assert_all_free(self) -> None:
        """Idle: every row free, nothing locked, free + cached + page 0 = capacity."""
        stats = self.scheduler.statistics()
        self.scheduler.check()
        assert not self.scheduler.has_unfinished
        assert stats.free_rows == self.config.max_running_requests
        assert stats.protected_tokens == 0
        assert stats.private_tokens == 0
        assert stats.reserved_tokens == self.config.page_size
        assert (
            stats.free_tokens + stats.cached_tokens + self.config.page_size == stats.capacity_tokens
        )
