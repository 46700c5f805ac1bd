"""A device that keeps a real (fake) KV memory.

It stores for which tokens the KV in every slot was computed, and runs steps in launch order, so that
each row must read exactly its own history through its table row: aliased pages, pages freed too
early, stale tables and KV that a failed step was to write all show up as wrong content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from runtime.request import Request
from runtime.runner import StepOutput
from runtime.scheduling.kv_tier import PageLoad
from runtime.scheduling.schedule_batch import ScheduleBatch
from runtime.scheduling.write_behind import PageCopy

NAN_LOGITS = "a NaN among the logits"
RUBBISH = 0  # KV by a step that was lost, or by a row that is known to have given NaN
NOBODY = ("", 0, -1)  # has computed what was loaded
SPOILT = -1  # KV that is NaN, but nobody knows it yet: who reads it gives NaN


def scripted_token(request_id: str, index: int) -> int:
    """Output token `index` of a request: the same whenever and beside whomever it is sampled."""
    return 100 + (sum(map(ord, request_id)) * 31 + index * 17) % 800


class FakeDevice:
    """Runs batches in launch order; returns scripted tokens.

    A KV slot holds a hash of everything its content depends on: the namespace, and all tokens up to
    its position; or RUBBISH, which nobody may read; or SPOILT. So does a slot of `states`, for the
    last token that the state has seen; a request's own is in the slot of its row.

    Args:
        script: (request id, output index) to the token that is sampled.
        recurrent: rows have states, without which they cannot go on.

    Attributes:
        spoilers: by request id, in which of its admissions it computes NaN; None: in all.
    """

    def __init__(
        self,
        page_size: int,
        rows: int,
        script: Callable[[str, int], int] = scripted_token,
        *,
        recurrent: bool = False,
    ) -> None:
        self.page_size = page_size
        self.states: dict[int, int] | None = {} if recurrent else None
        self.begun_from: dict[tuple[str, int], int] = {}  # by run: the saved state's place
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
        for made in batch.restore:
            self._compute_state(batch, batch.requests.index(made))
        assert len(set(batch.save_slots)) == len(batch.save_slots), "two states in one slot"
        begun = [self._begin(batch, b, trace) for b in range(len(batch.requests))]
        chains = [self._store(batch, b, trace) for b in range(len(batch.requests))]
        spoilt = [self._read(batch, b, chain, trace) for b, chain in enumerate(chains)]
        spoilt = [
            self._go_on(batch, b, *row, trace)
            for b, row in enumerate(zip(begun, chains, spoilt, strict=True))
        ]
        tokens = [self._sample(batch, i, b) for i, b in enumerate(batch.sampled)]
        failed = {i: NAN_LOGITS for i, b in enumerate(batch.sampled) if spoilt[b]}
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
        if self._is_spoiler(request):
            self.slots.update(dict.fromkeys(slots, SPOILT))
        self._writer.update(dict.fromkeys(slots, (name, admission, batch.step)))
        self._sound.difference_update(slots)
        trace.written.append(slots)
        return chain

    def _read(self, batch: ScheduleBatch, b: int, chain: list[int], trace: _Trace) -> bool:
        """Returns whether it was NaN, and what the row has written is NaN, too."""
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

    # Recurrent states. In the books of who wrote what, and what was finite, they stand below zero.

    def _compute_state(self, batch: ScheduleBatch, b: int) -> None:
        """A row's state is computed anew from its tokens before the step, over the KV of these."""
        if self.states is None:
            return
        request, row, start = batch.requests[b], batch.rows[b], batch.prefix_lens[b]
        history = [*request.input_ids, *request.output_ids][:start]
        chain = chain_of(request.namespace, history)
        found = [self.slots[self._slot(row, position)] for position in range(start)]
        assert all(kv in (SPOILT, want) for kv, want in zip(found, chain, strict=True))
        finite = found == chain and not self._is_spoiler(request)
        self.states[row] = ([RUBBISH, *chain])[-1] if finite else SPOILT
        self._note_written(-row, request, batch.step)

    def _begin(self, batch: ScheduleBatch, b: int, trace: _Trace) -> int | None:
        """What is in the state that a row goes on from; None: it begins with none."""
        row, request = batch.rows[b], batch.requests[b]
        saved = dict(zip(batch.state_rows, batch.state_slots, strict=True))
        slot = saved.get(b, row)
        if self.states is None or not batch.prefix_lens[b]:
            trace.state_read.append(None)
            return None
        if b in saved:
            self.begun_from[request.request_id, request.scheduling.admissions] = -slot
        trace.state_read.append(-slot)
        return self.states.get(slot, RUBBISH)

    def _go_on(
        self,
        batch: ScheduleBatch,
        b: int,
        begun: int | None,
        chain: list[int],
        spoilt: bool,
        trace: _Trace,
    ) -> bool:
        """Leaves a row's state in its slot and where it is saved; returns whether that, and what the
        row has computed, is NaN."""
        trace.states.append([])
        if self.states is None:
            return spoilt
        request, start = batch.requests[b], batch.prefix_lens[b]
        if begun is not None:
            name = f"step {batch.step}, {request.request_id}"
            assert begun in (SPOILT, chain[start - 1]), f"{name}: the state of other tokens"
        if begun == SPOILT and not spoilt:
            self.slots.update(dict.fromkeys(trace.written[b], SPOILT))
            spoilt = True
        left = {batch.rows[b]: len(chain)}
        saves = zip(batch.save_rows, batch.save_tokens, batch.save_slots, strict=True)
        left |= {slot: start + tokens for row, tokens, slot in saves if row == b}
        for slot, position in left.items():
            self.states[slot] = SPOILT if spoilt else chain[position - 1]
            self._note_written(-slot, request, batch.step)
        trace.states[-1].extend(-slot for slot in left)
        return spoilt

    def _note_written(self, place: int, request: Request, step: int) -> None:
        self._writer[place] = (request.request_id, request.scheduling.admissions, step)
        self._sound.discard(place)

    def _is_spoiler(self, request: Request) -> bool:
        return self.spoilers.get(request.request_id, -1) in (None, request.scheduling.admissions)

    def _put(self, places: Iterable[int], value: int) -> None:
        """Args: places: KV slots, and state slots below zero."""
        for place in places:
            if place >= 0:
                self.slots[place] = value
            elif self.states is not None:
                self.states[-place] = value

    def _content(self, place: int) -> int:
        if place >= 0:
            return self.slots[place]
        return RUBBISH if self.states is None else self.states[-place]

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

    def lose(self, batches: Sequence[ScheduleBatch], *, tables: bool = True) -> None:
        """These steps, all that are in flight, were lost: what they wrote, the newest tokens
        included, is rubbish; and unless `tables`, so is what they were to write into the table."""
        for batch in reversed(batches):
            trace = self._traces.pop(batch.step, None)
            if trace is None:
                continue  # it was never launched
            self._put([place for row in (*trace.written, *trace.states) for place in row], RUBBISH)
            for row in batch.rows:
                self.next_tokens[row] = -1
            for row, index, before in trace.table if not tables else ():
                self.table[row][index] = before

    def give_nan(
        self, batch: ScheduleBatch, b: int, later: Sequence[ScheduleBatch]
    ) -> tuple[set[str], set[str]]:
        """What a row has written is rubbish, that of a prompt's earlier chunks included but for what
        others have had tokens from, and so is what later steps in flight have built on that KV.

        Returns: whose rows of them have; and whose have gone on from such a state alone, which gives
            NaN, too.
        """
        failed = batch.requests[b]
        bad = {*self._traces[batch.step].written[b], *self._traces[batch.step].states[b]}
        if b < batch.num_prefill:
            run = failed.request_id, failed.scheduling.admissions
            bad = {slot for slot, writer in self._writer.items() if writer[:2] == run}
            bad -= self._sound
            self.tier.spoil(run)
        self._put(bad, RUBBISH)
        spoilt, nan_rows = set(), set()
        for other in later:
            trace = self._traces.get(other.step, _Trace())  # none where it was never run
            for row, made in enumerate(other.requests[: len(trace.read)]):
                before = trace.state_read[row]
                over_state = before is not None and self._content(before) == RUBBISH
                written = [*trace.written[row], *trace.states[row]]
                if any(self.slots[slot] == RUBBISH for slot in trace.read[row]) or (
                    over_state and made is failed
                ):
                    spoilt.add(made.request_id)
                    self._put(written, RUBBISH)
                elif over_state:
                    nan_rows.add(made.request_id)
                    self._put(written, SPOILT)
        return spoilt, nan_rows

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

    def gave_tokens(self, batch: ScheduleBatch, rows: Sequence[int]) -> None:
        """These rows of a step gave a token: what they have read was finite."""
        trace = self._traces[batch.step]
        for b in rows:
            before = trace.state_read[b]
            self._sound.update(trace.read[b] if before is None else [*trace.read[b], before])

    def written_by_others(self, batch: ScheduleBatch, b: int) -> dict[int, tuple[str, int, int]]:
        """What a row of a step has read that it had not computed itself since it was admitted: slots
        with their writers; a state that it began from among them."""
        made = batch.requests[b]
        run = made.request_id, made.scheduling.admissions
        read = self._traces[batch.step].read[b]
        if run in self.begun_from:
            read = [*read, self.begun_from[run]]
        writers = {slot: self._writer.get(slot, NOBODY) for slot in read}
        return {slot: writer for slot, writer in writers.items() if writer[:2] != run}

    def reveal_nan(self, writers: dict[int, tuple[str, int, int]]) -> bool:
        """Where these slots still hold NaN, it is known now; returns whether any do."""
        still = [slot for slot, writer in writers.items() if self._writer.get(slot) == writer]
        known = [slot for slot in still if self._content(slot) == SPOILT]
        self._put(known, RUBBISH)
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
    """What a step did: slots per row, and (row, index, page before) of the table. States: those
    written, and the one that the row went on from."""

    written: list[list[int]] = field(default_factory=list)
    read: list[list[int]] = field(default_factory=list)
    states: list[list[int]] = field(default_factory=list)
    state_read: list[int | None] = field(default_factory=list)
    table: list[tuple[int, int, int]] = field(default_factory=list)


def chain_of(namespace: str, tokens: Sequence[int]) -> list[int]:
    """For each position, a hash of the tokens up to it; never 0."""
    chain = []
    value = hash(namespace)
    for token in tokens:
        value = hash((value, token)) or 1
        chain.append(value)
    return chain
