"""One step's device tensors, made from a `ScheduleBatch`; how its ints get there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from ops.blocks.block import DecoderStep
from ops.op_set import AttentionBatch

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from torch import Tensor

    from runtime.execution.device import Device
    from runtime.execution.kv_pool import StepMemory
    from runtime.scheduling.schedule_batch import ScheduleBatch

_NO_IDS = np.empty(0, dtype=np.int32)


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
    rows, starts, lengths = _view(batch.rows), _view(batch.prefix_lens), _view(batch.extend_lens)
    indptr = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=indptr[1:])
    kv_lens = starts + lengths
    positions = np.arange(indptr[-1], dtype=np.int32)
    positions += np.repeat(starts - indptr[:-1], lengths)
    sampled, token_rows = _view(batch.sampled), np.repeat(rows, lengths)
    wanted = np.concatenate((indptr[1:][sampled] - 1, prompt_tokens))
    arrays = (rows, indptr, kv_lens, wanted, rows[sampled], _view(batch.sample_positions))
    place = _place_on_host if staging is None else partial(_place_on_device, staging)
    placed = place((*arrays, _view(batch.input_ids), positions, token_rows), batch, memory)
    rows_d, indptr_d, kv_lens_d, logit_tokens, sampled_rows, sample_positions, *others = placed
    input_ids, token_positions, slots = others
    if memory.long_prompts is not None:
        rope_rows = memory.long_prompts.rows(batch, positions, lengths)
        token_positions = token_positions if rope_rows is None else rope_rows
    table = memory.block_table
    attention = AttentionBatch(
        block_table=table.pages,
        rows=rows_d,
        qo_indptr=indptr_d,
        kv_lens=kv_lens_d,
        page_size=table.page_size,
        max_q_len=int(lengths.max()),
        max_kv_len=int(kv_lens.max()),
    )
    step = DecoderStep(
        input_ids, token_positions, slots, attention, logit_tokens, memory.pool.caches
    )
    return ForwardBatch(step, SampledRows(sampled_rows, sample_positions))


def _place_on_device(
    staging: Staging, arrays: tuple[np.ndarray, ...], batch: ScheduleBatch, memory: StepMemory
) -> list[Tensor]:
    """The arrays of `make_forward_batch` as tensors, the last three as ids, positions and slots of
    the tokens. Queued in one copy; nothing is waited for."""
    on_device = staging.upload((*arrays, *_table_entries(batch)))
    rows, indptr, kv_lens, *ends, ids, positions, token_rows = on_device[: len(arrays)]
    table = memory.block_table
    if len(batch.table_rows):
        table.write(*on_device[len(arrays) :])
    newest = memory.next_tokens.index_select(0, rows[batch.num_prefill :].long())
    positions = positions.long()
    tokens = (torch.cat((ids.long(), newest)), positions, table.slots(token_rows, positions))
    return [rows, indptr, kv_lens, *(tensor.long() for tensor in ends), *tokens]


def _place_on_host(
    arrays: tuple[np.ndarray, ...], batch: ScheduleBatch, memory: StepMemory
) -> list[Tensor]:
    """The same in numpy, whose calls cost a fraction of torch's: a decode step of a small model has
    nothing to hide them behind."""
    rows, indptr, kv_lens, *ends, ids, positions, token_rows = arrays
    table = memory.block_table
    pages, newest = table.pages.numpy(), memory.next_tokens.numpy()
    if len(batch.table_rows):
        row, index, page = _table_entries(batch)
        pages[row, index] = page
    slots = pages[token_rows, positions // table.page_size].astype(np.int64)
    slots *= table.page_size
    slots += positions % table.page_size
    input_ids = np.concatenate((ids, newest[rows[batch.num_prefill :]]))
    wide = [array.astype(np.int64, copy=False) for array in (*ends, input_ids, positions, slots)]
    # The batch's own arrays are read-only.
    return [torch.from_numpy(array) for array in (rows.copy(), indptr, kv_lens, *wide)]


def make_replay_batch(
    batch: ScheduleBatch, staging: Staging, memory: StepMemory
) -> tuple[Tensor, Tensor, SampledRows]:
    """The device tensors of a decode step for a captured graph and the sampler, after writing its
    entries of the block table: what the graph reads, no more.

    Every row of a decode step is sampled, at the position behind its keys.

    Returns: request rows [B] int32; keys of each, the new token included, [B] int32; and both for
        the sampler.
    """
    kv_lens = _view(batch.prefix_lens) + 1
    rows_d, kv_lens_d, *table_entries = staging.upload(
        (_view(batch.rows), kv_lens, *_table_entries(batch))
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
    return (np.concatenate(parts) if parts else _NO_IDS), counts


def _table_entries(batch: ScheduleBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, index, page) of the block table's new entries, [n] each."""
    return _view(batch.table_rows), _view(batch.table_indices), _view(batch.table_pages)


def _view(values: array[int]) -> np.ndarray:
    return np.frombuffer(values, dtype=np.int32) if len(values) else _NO_IDS
