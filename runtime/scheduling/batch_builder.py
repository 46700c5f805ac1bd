"""Turns what a pass decided into a ScheduleBatch, and takes the KV it needs."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from runtime.request import RequestState
from runtime.scheduling.schedule_batch import ScheduleBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.request import Request
    from runtime.scheduling.kv_memory import KVMemory
    from runtime.scheduling.prefill_adder import Admitted


def build_batch(
    step: int, admitted: Sequence[Admitted], running: Sequence[Request], memory: KVMemory
) -> ScheduleBatch:
    """The step with these prefill rows, then one decode row per running request.

    Rows, pages and lengths of the requests are theirs from here on. What a complete prompt
    computed is put into the cache at once: later steps run after this one on the device.
    """
    batch = ScheduleBatch(step, num_prefill=len(admitted))
    for item in admitted:
        _add_prefill_row(batch, item, memory)
    _add_decode_rows(batch, running, memory)
    _write_tables(batch, memory)
    for item in admitted:
        if item.last:
            memory.share(item.request, item.request.length)
    return batch


def _add_prefill_row(batch: ScheduleBatch, item: Admitted, memory: KVMemory) -> None:
    request, record = item.request, item.request.scheduling
    if item.match is not None:
        memory.start(request, item.match)
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
