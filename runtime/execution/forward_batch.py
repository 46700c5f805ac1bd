"""One step's device tensors, made from a `ScheduleBatch`; how its ints get there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ops.blocks.block import DecoderStep
from ops.op_set import AttentionBatch
from runtime.execution.packed_step import (
    NO_INTS,
    pack_step,
    packed_shape,
    prompt_positions,
    unpack_step,
    view,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from runtime.execution.device import Device
    from runtime.execution.kv_pool import StepMemory
    from runtime.execution.packed_step import PackedShape
    from runtime.scheduling.schedule_batch import ScheduleBatch


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows of a step that get a token.

    Args:
        rows: [S] int64, request rows, in the order of the batch.
        positions: [S] int64, the number of tokens before the one sampled.
    """

    rows: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A step for the decoder and the sampler, on the device. Valid until the step is done.

    Args:
        step: its `logit_tokens` are those of the sampled rows first, then the tokens whose prompt
            log-probabilities are asked for.
    """

    step: DecoderStep
    sampled: SampledRows


class Staging:
    """Moves a step's int arrays to the device: packed into one buffer, one copy.

    At most two steps are in flight, so there are two sets. A set is written again only when the
    copies of the step that used it last are done; its views belong to that step until then.
    """

    def __init__(self, device: Device, capacity: int = 4096) -> None:
        self._device = device
        self._buffers = [self._allocate(capacity) for _ in range(2)]
        self._fences = [device.fence() for _ in range(2)]
        self._next = 0

    def _allocate(self, capacity: int) -> Tensor:
        return torch.empty(capacity, dtype=torch.int32, pin_memory=self._device.pinned)

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """int32 device tensors with the values of 1-D int arrays, in the same order."""
        sizes = [len(array) for array in arrays]
        total = sum(sizes)
        which = self._next
        self._next = 1 - which
        self._fences[which].synchronize()
        if self._buffers[which].shape[0] < total:
            self._buffers[which] = self._allocate(2 * total)
        host = self._buffers[which][:total]
        np.concatenate(arrays, out=host.numpy(), casting="same_kind")
        on_device = host.to(self._device.torch_device, non_blocking=True)
        self._fences[which].record()
        return list(on_device.split(sizes))


def make_forward_batch(
    batch: ScheduleBatch, prompt_tokens: np.ndarray, staging: Staging | None, memory: StepMemory
) -> ForwardBatch:
    """The device tensors of a step, after writing the step's entries of the block table.

    Args:
        prompt_tokens: indices of the tokens that need logits beside the sampled ones.
        staging: None where the device's memory is the host's.
    """
    if staging is None:
        if not (batch.num_prefill or len(prompt_tokens) or memory.states):
            return _make_decode_on_host(batch, memory)
        return _make_on_host(batch, prompt_tokens, memory)
    shape = packed_shape(batch, len(prompt_tokens))
    packed, sampled = upload_step(batch, shape, staging, memory, prompt_tokens)
    lengths, starts = view(batch.extend_lens), view(batch.prefix_lens)
    step = unpack_step(
        packed,
        shape,
        memory,
        max_q_len=int(lengths.max()),
        max_kv_len=int((starts + lengths).max()),
    )
    if memory.long_prompts is not None:
        positions = prompt_positions(batch)
        rope_rows = memory.long_prompts.rows(batch, positions, lengths[: batch.num_prefill])
        if rope_rows is not None:
            decoding = step.positions[: batch.num_decode]
            step = replace(step, positions=torch.cat((decoding, rope_rows)))
    if memory.states is not None:
        step = replace(step, recurrent=memory.states.of(batch, decode_first=True))
    return ForwardBatch(step, sampled)


def upload_step(
    batch: ScheduleBatch,
    shape: PackedShape,
    staging: Staging,
    memory: StepMemory,
    prompt_tokens: np.ndarray = NO_INTS,
) -> tuple[Tensor, SampledRows]:
    """A step packed into a shape that holds it, on the device, and its sampled rows, after writing
    its entries of the block table. Queued in one copy; nothing is waited for."""
    packed, rows, positions, *table_entries = staging.upload(
        (
            pack_step(batch, shape, prompt_tokens),
            view(batch.rows)[view(batch.sampled)],
            view(batch.sample_positions),
            *_table_entries(batch),
        )
    )
    if len(batch.table_rows):
        memory.block_table.write(*table_entries)
    return packed, SampledRows(rows.long(), positions.long())


def _make_on_host(
    batch: ScheduleBatch, prompt_tokens: np.ndarray, memory: StepMemory
) -> ForwardBatch:
    """In numpy, whose calls cost a fraction of torch's: a decode step of a small model has nothing
    to hide them behind. Tokens and rows stand as in the batch."""
    rows, starts, lengths = view(batch.rows), view(batch.prefix_lens), view(batch.extend_lens)
    indptr = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=indptr[1:])
    kv_lens = starts + lengths
    positions = np.arange(indptr[-1], dtype=np.int32)
    positions += np.repeat(starts - indptr[:-1], lengths)
    sampled, token_rows = view(batch.sampled), np.repeat(rows, lengths)
    table = memory.block_table
    pages, newest = table.pages.numpy(), memory.next_tokens.numpy()
    if len(batch.table_rows):
        row, index, page = _table_entries(batch)
        pages[row, index] = page
    slots = pages[token_rows, positions // table.page_size].astype(np.int64)
    slots *= table.page_size
    slots += positions % table.page_size
    input_ids = np.concatenate((view(batch.input_ids), newest[rows[batch.num_prefill :]]))
    wanted = np.concatenate((indptr[1:][sampled] - 1, prompt_tokens))
    token_positions = _wide(positions)
    if memory.long_prompts is not None:
        rope_rows = memory.long_prompts.rows(batch, positions, lengths)
        token_positions = token_positions if rope_rows is None else rope_rows
    attention = AttentionBatch(
        block_table=table.pages,
        rows=torch.from_numpy(rows.copy()),  # the batch's own arrays are read-only
        qo_indptr=torch.from_numpy(indptr),
        kv_lens=torch.from_numpy(kv_lens),
        page_size=table.page_size,
        max_q_len=int(lengths.max()),
        max_kv_len=int(kv_lens.max()),
    )
    step = DecoderStep(
        _wide(input_ids),
        token_positions,
        torch.from_numpy(slots),
        attention,
        _wide(wanted),
        memory.pool.caches,
        None if memory.states is None else memory.states.of(batch, decode_first=False),
    )
    return ForwardBatch(
        step, SampledRows(_wide(rows[sampled]), _wide(view(batch.sample_positions)))
    )


def _make_decode_on_host(batch: ScheduleBatch, memory: StepMemory) -> ForwardBatch:
    """`_make_on_host` of a decode step in half the calls: each row has one token and is sampled."""
    rows, starts = view(batch.rows), view(batch.prefix_lens)
    count, table = len(rows), memory.block_table
    pages = table.pages.numpy()
    if len(batch.table_rows):
        row, index, page = _table_entries(batch)
        pages[row, index] = page
    kv_lens, indptr = starts + 1, np.arange(count + 1, dtype=np.int32)
    slots = pages[rows, starts // table.page_size].astype(np.int64)
    slots *= table.page_size
    slots += starts % table.page_size
    token_rows = _wide(rows)
    attention = AttentionBatch(
        block_table=table.pages,
        rows=torch.from_numpy(rows.copy()),
        qo_indptr=torch.from_numpy(indptr),
        kv_lens=torch.from_numpy(kv_lens),
        page_size=table.page_size,
        max_q_len=1,
        max_kv_len=int(kv_lens.max()),
    )
    step = DecoderStep(
        torch.from_numpy(memory.next_tokens.numpy()[rows]),
        _wide(starts),
        torch.from_numpy(slots),
        attention,
        _wide(indptr[:count]),
        memory.pool.caches,
    )
    return ForwardBatch(step, SampledRows(token_rows, _wide(kv_lens)))


def _wide(ints: np.ndarray) -> Tensor:
    """A tensor of 64-bit ints; the batch's own arrays are of 32 and read-only."""
    return torch.from_numpy(ints.astype(np.int64, copy=False))


def make_replay_batch(
    batch: ScheduleBatch, staging: Staging, memory: StepMemory
) -> tuple[Tensor, Tensor, SampledRows]:
    """The device tensors of a decode step for a captured graph and the sampler, after writing its
    entries of the block table: what the graph reads, no more.

    Every row of a decode step is sampled, at the position behind its keys.

    Returns: request rows [B] int32; keys of each, the new token included, [B] int32; and both for
        the sampler.
    """
    kv_lens = view(batch.prefix_lens) + 1
    rows_d, kv_lens_d, *table_entries = staging.upload(
        (view(batch.rows), kv_lens, *_table_entries(batch))
    )
    if len(batch.table_rows):
        memory.block_table.write(*table_entries)
    return rows_d, kv_lens_d, SampledRows(rows_d.long(), kv_lens_d.long())


def decode_step(rows: Tensor, kv_lens: Tensor, memory: StepMemory, max_kv_len: int) -> DecoderStep:
    """A decode step whose every row is sampled, from device tensors alone.

    No value is read by the host, so a CUDA graph can capture it with static rows and kv_lens; a
    padding row is row 0 with length 1, which reads and writes the reserved page only.

    Args:
        rows: [B] int32, request rows. kv_lens: [B] int32, keys of each, the new token included.
        max_kv_len: an upper bound of kv_lens.
    """
    count, table = rows.shape[0], memory.block_table
    positions = kv_lens.long() - 1
    indptr = torch.arange(count + 1, dtype=torch.int32, device=rows.device)
    return DecoderStep(
        input_ids=memory.next_tokens.index_select(0, rows.long()),
        positions=positions,
        slots=table.slots(rows, positions),
        attention=AttentionBatch(
            block_table=table.pages,
            rows=rows,
            qo_indptr=indptr,
            kv_lens=kv_lens,
            page_size=table.page_size,
            max_q_len=1,
            max_kv_len=max_kv_len,
        ),
        logit_tokens=indptr[:count].long(),
        caches=memory.pool.caches,
    )


def prompt_token_indices(batch: ScheduleBatch) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """The tokens of a step whose next prompt token's log-probability is asked for.

    Returns: their indices in the step, and (batch row, number of its tokens) in the same order.
    The last token of a prompt has no next prompt token; nor has any output token, which a
    retracted request prefills again behind its prompt.
    """
    parts: list[np.ndarray] = []
    counts: list[tuple[int, int]] = []
    first = 0
    for row in range(batch.num_prefill):
        request = batch.requests[row]
        if request.sampling.prompt_logprobs is not None:
            known = len(request.input_ids) - 1 - batch.prefix_lens[row]
            count = max(0, min(batch.extend_lens[row], known))
            parts.append(np.arange(first, first + count, dtype=np.int32))
            counts.append((row, count))
        first += batch.extend_lens[row]
    return (np.concatenate(parts) if parts else NO_INTS), counts


def _table_entries(batch: ScheduleBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, index, page) of the block table's new entries, [n] each."""
    return view(batch.table_rows), view(batch.table_indices), view(batch.table_pages)
