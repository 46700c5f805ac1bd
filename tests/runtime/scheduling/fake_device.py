"""A device that keeps a real (fake) KV memory.

It stores for which tokens the KV in every slot was computed, and runs steps in launch order, so that
each row must read exactly its own history through its table row: aliased pages, pages freed too
early, stale tables and KV that a failed step was to write all show up as wrong content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from runtime.runner import StepOutput
from runtime.scheduling.kv_tier import PageLoad
from runtime.scheduling.schedule_batch import ScheduleBatch
from runtime.scheduling.write_behind import PageCopy

NO_NUMBER = "a NaN among the logits"
RUBBISH = 0  # KV by a step that was lost, or by a row that is known to have given no number
NOBODY = ("", 0, -1)  # has computed what was loaded
SPOILT = -1  # KV that is no number either, but nobody knows it yet: who reads it gives no number


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
