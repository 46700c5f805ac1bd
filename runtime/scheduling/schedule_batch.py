"""ScheduleBatch: what one step computes, as ints; and how it is made of what a pass decided.

Made whole by `book_batch`, never changed afterwards.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.request import RequestState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.request import Request
    from runtime.scheduling.kv_memory import KVMemory
    from runtime.scheduling.radix_cache import PrefixMatch
    from runtime.scheduling.saved_states import SavedStates


@dataclass(frozen=True, slots=True)
class Admitted:
    """A prefill row of the step.

    Args:
        match: the prefix a new row starts from, locked; None for the next chunk of a started one.
        start, tokens: what it computes.
        last: whether its prompt is then complete.
    """

    request: Request
    match: PrefixMatch | None
    start: int
    tokens: int
    last: bool


def ints() -> array[int]:
    """An empty array of 32-bit ints: torch and numpy read its buffer without copying."""
    return array("i")


@dataclass(slots=True, eq=False)
class ScheduleBatch:
    """One step: prefill rows first, then decode rows. All arrays are parallel to `requests`
    unless said otherwise.

    A decode row is an extend of length 1. Its input token is not here: the step that sampled it
    may not be read yet, so the device gathers it from its next-token buffer at the request's row.
    KV slots follow from the block table: the token at position p of a row is stored at
    table[row][p // page_size] * page_size + p % page_size.

    Args:
        step: number of the step, counted from 0.
        num_prefill: the first num_prefill rows are prefill rows, the others decode rows.
        rows: of the block table.
        prefix_lens: position of the first new token = tokens of the row already in the pool.
        extend_lens: new tokens; 1 for decode rows.
        input_ids: the prefill rows' new tokens, concatenated.
        sampled: batch rows (ascending) whose last position is sampled: every row but the middle
            chunks. `StepOutput.token_ids` is parallel to it.
        sample_positions: parallel to `sampled`; the number of tokens before the one sampled
            (counter of the random generator).
        output_counts: parallel to `sampled`; output tokens before the one sampled (min_tokens).
        table_rows, table_indices, table_pages: parallel to one another; entries of the block
            table to write before the step: table[row][page index] = page.
        state_rows, state_slots: parallel to one another; batch rows that go on from the recurrent
            state in this slot and not from that of their own table row.
        save_rows, save_tokens, save_slots: parallel to one another; the recurrent state of a batch
            row behind so many of its new tokens is also left in this slot. The step reads all slots
            before it leaves anything there.
        retry: these rows were in a step that failed; they compute the same again.
        restore: requests of this step whose row a step that failed, or was taken back with it, may
            have changed on the device. Before this step is launched, what the device keeps per row
            (newest token, penalty counts, recurrent state) is to be set anew from `input_ids` and
            `output_ids`, which then are all tokens before this step.
    """

    step: int
    num_prefill: int = 0
    requests: list[Request] = field(default_factory=list)
    rows: array[int] = field(default_factory=ints)
    prefix_lens: array[int] = field(default_factory=ints)
    extend_lens: array[int] = field(default_factory=ints)
    input_ids: array[int] = field(default_factory=ints)
    sampled: array[int] = field(default_factory=ints)
    sample_positions: array[int] = field(default_factory=ints)
    output_counts: array[int] = field(default_factory=ints)
    table_rows: array[int] = field(default_factory=ints)
    table_indices: array[int] = field(default_factory=ints)
    table_pages: array[int] = field(default_factory=ints)
    state_rows: array[int] = field(default_factory=ints)
    state_slots: array[int] = field(default_factory=ints)
    save_rows: array[int] = field(default_factory=ints)
    save_tokens: array[int] = field(default_factory=ints)
    save_slots: array[int] = field(default_factory=ints)
    retry: bool = False
    restore: Sequence[Request] = ()

    @property
    def num_decode(self) -> int:
        return len(self.requests) - self.num_prefill

    @property
    def prefill_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def kind(self) -> str:
        """ "prefill", "decode" or "mixed"."""
        if not self.num_prefill:
            return "decode"
        return "mixed" if self.num_decode else "prefill"


def book_batch(
    step: int,
    admitted: Sequence[Admitted],
    running: Sequence[Request],
    memory: KVMemory,
    *,
    retry: bool = False,
    restore: Sequence[Request] = (),
) -> ScheduleBatch:
    """Books the step with these prefill rows, then one decode row per running request, and returns
    it.

    The requests get their rows and pages, and their lengths, counts and states move on. A prompt
    that the step completes is put into the cache at once: later steps run after this one on the
    device.

    Args:
        retry, restore: see `ScheduleBatch`.
    """
    batch = ScheduleBatch(step, len(admitted), retry=retry, restore=restore)
    for row, item in enumerate(admitted):
        if item.match is not None:
            _start(batch, row, item, memory)
    for item in admitted:
        _add_prefill_row(batch, item, memory)
    _add_decode_rows(batch, running, memory)
    _write_tables(batch, memory)
    for item in admitted:
        if item.last:
            memory.insert(item.request, item.request.length)
    return batch


def _start(batch: ScheduleBatch, row: int, item: Admitted, memory: KVMemory) -> None:
    """Before any row of the step is given room: the state that one goes on from may have to make
    way for what another is to save."""
    assert item.match is not None
    node = item.match.node
    memory.start(item.request, item.match)
    if node is not None and node.state is not None:
        batch.state_rows.append(row)
        batch.state_slots.append(node.state.slot)


def _save_states(batch: ScheduleBatch, item: Admitted, states: SavedStates) -> None:
    for state in states.save(item.request, batch.step, item.start, item.start + item.tokens):
        batch.save_rows.append(len(batch.requests))
        batch.save_tokens.append(state.position - item.start)
        batch.save_slots.append(state.slot)


def _add_prefill_row(batch: ScheduleBatch, item: Admitted, memory: KVMemory) -> None:
    request, record = item.request, item.request.scheduling
    memory.grow(request, item.tokens)
    record.last_step = batch.step
    if item.last:
        request.state = RequestState.RUNNING
        batch.sampled.append(len(batch.requests))
        batch.sample_positions.append(request.length)
        batch.output_counts.append(request.launched_tokens)
        request.launched_tokens += 1
    else:
        request.state = RequestState.PREFILLING
    if memory.states is not None:
        _save_states(batch, item, memory.states)
    batch.requests.append(request)
    batch.rows.append(request.row)
    batch.prefix_lens.append(item.start)
    batch.extend_lens.append(item.tokens)
    batch.input_ids.extend(request.tokens_between(item.start, item.start + item.tokens))


def _add_decode_rows(batch: ScheduleBatch, running: Sequence[Request], memory: KVMemory) -> None:
    """The hot path: whole arrays at a time, and one short loop. Only a row whose last page is full
    needs more than its counters moved."""
    if not running:
        return
    first = len(batch.requests)
    starts = [request.length for request in running]
    batch.requests.extend(running)
    batch.rows.extend([request.row for request in running])
    batch.prefix_lens.extend(starts)
    batch.extend_lens.extend(array("i", [1]) * len(starts))
    batch.sampled.extend(range(first, first + len(starts)))
    batch.sample_positions.extend([start + 1 for start in starts])
    batch.output_counts.extend([request.launched_tokens for request in running])
    step, size = batch.step, memory.page_size
    for request in running:
        if not request.length % size:
            memory.grow(request, 1)
        else:
            request.length += 1
        request.launched_tokens += 1
        request.scheduling.last_step = step
    if memory.states is not None:
        _save_generated(batch, first, memory.states)


def _save_generated(batch: ScheduleBatch, first: int, states: SavedStates) -> None:
    """Args: first: the first decode row."""
    for row, request in enumerate(batch.requests[first:], first):
        state = states.save_generated(request, batch.step)
        if state is not None:
            batch.save_rows.append(row)
            batch.save_tokens.append(1)
            batch.save_slots.append(state.slot)


def _write_tables(batch: ScheduleBatch, memory: KVMemory) -> None:
    """Entries of the block table that the device does not have yet."""
    for request in memory.stale_tables:
        record = request.scheduling
        first, last = record.synced_pages, len(request.pages)
        if first >= last:
            continue
        rows, pages = array("i", [request.row]) * (last - first), request.pages[first:]
        indices = memory.page_indices(first, last)
        if not batch.table_rows:  # a long prefix is 60,000 entries: no copy without need
            batch.table_rows, batch.table_indices, batch.table_pages = rows, indices, pages
        else:
            batch.table_rows.extend(rows)
            batch.table_indices.extend(indices)
            batch.table_pages.extend(pages)
        record.synced_pages = last
    memory.stale_tables.clear()
