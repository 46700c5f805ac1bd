"""One step's device tensors, made from a `ScheduleBatch`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ops.blocks.block import DecoderStep
from ops.op_set import AttentionBatch

if TYPE_CHECKING:
    from array import array

    from torch import Tensor

    from runtime.execution.block_table import BlockTable
    from runtime.execution.kv_pool import KVPool
    from runtime.execution.staging import Staging
    from runtime.scheduling.schedule_batch import ScheduleBatch

_NO_IDS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What steps leave to one another on the device, for the life of a runner.

    Args:
        next_tokens: [R] int64, the newest token of each request row: the sampler writes it, the
            next step's decode rows read it, and the host waits for neither.
    """

    block_table: BlockTable
    pool: KVPool
    next_tokens: Tensor


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


@dataclass(frozen=True, slots=True)
class ReplayBatch:
    """A decode step for a captured graph and the sampler: what the graph reads, no more.

    Args:
        rows: [B] int32, request rows. kv_lens: [B] int32, keys of each, the new token included.
    """

    rows: Tensor
    kv_lens: Tensor
    sampled: SampledRows


def make_forward_batch(
    batch: ScheduleBatch, prompt_tokens: np.ndarray, staging: Staging, memory: StepMemory
) -> ForwardBatch:
    """The device tensors of a step, after writing the step's entries of the block table.

    Args:
        prompt_tokens: indices of the tokens that need logits beside the sampled ones.
    """
    rows, starts, lengths = _view(batch.rows), _view(batch.prefix_lens), _view(batch.extend_lens)
    indptr = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=indptr[1:])
    tokens = int(indptr[-1])
    sampled = _view(batch.sampled)
    kv_lens = starts + lengths
    positions = np.arange(tokens, dtype=np.int32) + np.repeat(starts - indptr[:-1], lengths)
    logit_tokens = np.concatenate((indptr[1:][sampled] - 1, prompt_tokens)).astype(np.int32)
    on_device = staging.upload(
        (
            rows,
            indptr,
            kv_lens,
            np.repeat(rows, lengths),
            positions,
            _view(batch.input_ids),
            logit_tokens,
            rows[sampled],
            _view(batch.sample_positions),
            *_table_entries(batch),
        )
    )
    rows_d, indptr_d, kv_lens_d, token_rows, positions_d, ids, logits_at, *others = on_device
    sampled_rows, sample_positions, *table_entries = others
    table = memory.block_table
    if len(batch.table_rows):
        table.write(*table_entries)
    positions_d = positions_d.long()
    decode_rows = rows_d[batch.num_prefill :].long()
    newest = memory.next_tokens.index_select(0, decode_rows)
    return ForwardBatch(
        step=DecoderStep(
            input_ids=torch.cat((ids.long(), newest)),
            positions=positions_d,
            slots=table.slots(token_rows, positions_d),
            attention=AttentionBatch(
                block_table=table.pages,
                rows=rows_d,
                qo_indptr=indptr_d,
                kv_lens=kv_lens_d,
                page_size=table.page_size,
                max_q_len=int(lengths.max()),
                max_kv_len=int(kv_lens.max()),
            ),
            logit_tokens=logits_at.long(),
            caches=memory.pool.caches,
        ),
        sampled=SampledRows(sampled_rows.long(), sample_positions.long()),
    )


def host_forward_batch(
    batch: ScheduleBatch, prompt_tokens: np.ndarray, memory: StepMemory
) -> ForwardBatch:
    """`make_forward_batch` where the device's memory is the host's: in numpy, whose calls cost a
    fraction of torch's. A decode step of a small model has nothing to hide them behind."""
    rows, starts, lengths = _view(batch.rows), _view(batch.prefix_lens), _view(batch.extend_lens)
    table = memory.block_table
    sampled, page_size = _view(batch.sampled), table.page_size
    indptr = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=indptr[1:])
    kv_lens = starts + lengths
    pages, newest = table.pages.numpy(), memory.next_tokens.numpy()
    if len(batch.table_rows):
        row, index, page = _table_entries(batch)
        pages[row, index] = page
    positions = np.arange(indptr[-1], dtype=np.int64)
    positions += np.repeat(starts - indptr[:-1], lengths)
    slots = pages[np.repeat(rows, lengths), positions // page_size].astype(np.int64)
    slots *= page_size
    slots += positions % page_size
    input_ids = np.concatenate((_view(batch.input_ids), newest[rows[batch.num_prefill :]]))
    logit_tokens = np.concatenate((indptr[1:][sampled] - 1, prompt_tokens))
    as_tensor = torch.from_numpy
    return ForwardBatch(
        step=DecoderStep(
            input_ids=as_tensor(input_ids.astype(np.int64, copy=False)),
            positions=as_tensor(positions),
            slots=as_tensor(slots),
            attention=AttentionBatch(
                block_table=table.pages,
                rows=as_tensor(rows.copy()),  # the batch's own arrays are read-only
                qo_indptr=as_tensor(indptr),
                kv_lens=as_tensor(kv_lens),
                page_size=page_size,
                max_q_len=int(lengths.max()),
                max_kv_len=int(kv_lens.max()),
            ),
            logit_tokens=as_tensor(logit_tokens.astype(np.int64)),
            caches=memory.pool.caches,
        ),
        sampled=SampledRows(
            rows=as_tensor(rows[sampled].astype(np.int64)),
            positions=as_tensor(_view(batch.sample_positions).astype(np.int64)),
        ),
    )


def make_replay_batch(batch: ScheduleBatch, staging: Staging, memory: StepMemory) -> ReplayBatch:
    """The device tensors of a decode step, after writing its entries of the block table.

    Every row of a decode step is sampled, at the position behind its keys.
    """
    kv_lens = _view(batch.prefix_lens) + 1
    rows_d, kv_lens_d, *table_entries = staging.upload(
        (_view(batch.rows), kv_lens, *_table_entries(batch))
    )
    if len(batch.table_rows):
        memory.block_table.write(*table_entries)
    return ReplayBatch(rows_d, kv_lens_d, SampledRows(rows_d.long(), kv_lens_d.long()))


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
