"""One step's device tensors, made from a `ScheduleBatch`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ops.op_set import AttentionBatch

if TYPE_CHECKING:
    from array import array

    from torch import Tensor

    from runtime.execution.block_table import BlockTable
    from runtime.execution.staging import Staging
    from runtime.scheduling.schedule_batch import ScheduleBatch

_NO_IDS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """What a step computes, on the device. Valid until the step is done.

    Args:
        input_ids, positions, slots: [T] int64.
        logit_tokens: [N] int64, indices into the T tokens: those of the sampled rows first, then
            the tokens whose prompt log-probabilities are asked for.
        sampled_rows: [S] int64, request rows of the sampled rows, in their order.
        sample_positions: [S] int64, the number of tokens before the one sampled.
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    attention: AttentionBatch
    logit_tokens: Tensor
    sampled_rows: Tensor
    sample_positions: Tensor


def make_forward_batch(
    batch: ScheduleBatch,
    prompt_tokens: np.ndarray,
    staging: Staging,
    table: BlockTable,
    next_tokens: Tensor,
) -> ForwardBatch:
    """The device tensors of a step, after writing the step's entries of the request table.

    Args:
        prompt_tokens: indices of the tokens that need logits beside the sampled ones.
        next_tokens: [R] int64, the newest token of each request row: the decode rows' input.
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
            _view(batch.table_rows),
            _view(batch.table_indices),
            _view(batch.table_pages),
        )
    )
    rows_d, indptr_d, kv_lens_d, token_rows, positions_d, ids, logits_at, sampled_rows = on_device[
        :8
    ]
    sample_positions, *table_entries = on_device[8:]
    if len(batch.table_rows):
        table.write(*table_entries)
    positions_d = positions_d.long()
    decode_rows = rows_d[batch.num_prefill :].long()
    return ForwardBatch(
        input_ids=torch.cat((ids.long(), next_tokens.index_select(0, decode_rows))),
        positions=positions_d,
        slots=table.slots(token_rows, positions_d),
        attention=AttentionBatch(
            block_table=table.table,
            rows=rows_d,
            qo_indptr=indptr_d,
            kv_lens=kv_lens_d,
            page_size=table.page_size,
            max_q_len=int(lengths.max()),
            max_kv_len=int(kv_lens.max()),
        ),
        logit_tokens=logits_at.long(),
        sampled_rows=sampled_rows.long(),
        sample_positions=sample_positions.long(),
    )


def host_forward_batch(
    batch: ScheduleBatch, prompt_tokens: np.ndarray, table: BlockTable, next_tokens: Tensor
) -> ForwardBatch:
    """`make_forward_batch` where the device's memory is the host's: in numpy, whose calls cost a
    fraction of torch's. A decode step of a small model has nothing to hide them behind."""
    rows, starts, lengths = _view(batch.rows), _view(batch.prefix_lens), _view(batch.extend_lens)
    sampled, page_size = _view(batch.sampled), table.page_size
    indptr = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=indptr[1:])
    kv_lens = starts + lengths
    pages, newest = table.table.numpy(), next_tokens.numpy()
    if len(batch.table_rows):
        pages[_view(batch.table_rows), _view(batch.table_indices)] = _view(batch.table_pages)
    positions = np.arange(indptr[-1], dtype=np.int64)
    positions += np.repeat(starts - indptr[:-1], lengths)
    slots = pages[np.repeat(rows, lengths), positions // page_size].astype(np.int64)
    slots *= page_size
    slots += positions % page_size
    input_ids = np.concatenate((_view(batch.input_ids), newest[rows[batch.num_prefill :]]))
    logit_tokens = np.concatenate((indptr[1:][sampled] - 1, prompt_tokens))
    as_tensor = torch.from_numpy
    return ForwardBatch(
        input_ids=as_tensor(input_ids.astype(np.int64, copy=False)),
        positions=as_tensor(positions),
        slots=as_tensor(slots),
        attention=AttentionBatch(
            block_table=table.table,
            rows=as_tensor(rows.copy()),  # the batch's own arrays are read-only
            qo_indptr=as_tensor(indptr),
            kv_lens=as_tensor(kv_lens),
            page_size=page_size,
            max_q_len=int(lengths.max()),
            max_kv_len=int(kv_lens.max()),
        ),
        logit_tokens=as_tensor(logit_tokens.astype(np.int64)),
        sampled_rows=as_tensor(rows[sampled].astype(np.int64)),
        sample_positions=as_tensor(_view(batch.sample_positions).astype(np.int64)),
    )


def decode_forward_batch(
    rows: Tensor,
    kv_lens: Tensor,
    table: BlockTable,
    next_tokens: Tensor,
    max_kv_len: int,
) -> ForwardBatch:
    """A decode step whose every row is sampled, from device tensors alone.

    No value is read by the host, so a CUDA graph can capture it with static rows and kv_lens; a
    padding row is row 0 with length 1, which reads and writes the reserved page only.

    Args:
        rows: [B] int32, request rows. kv_lens: [B] int32, keys of each, the new token included.
        max_kv_len: an upper bound of kv_lens.
    """
    count = rows.shape[0]
    long_rows = rows.long()
    positions = kv_lens.long() - 1
    indptr = torch.arange(count + 1, dtype=torch.int32, device=rows.device)
    return ForwardBatch(
        input_ids=next_tokens.index_select(0, long_rows),
        positions=positions,
        slots=table.slots(rows, positions),
        attention=AttentionBatch(
            block_table=table.table,
            rows=rows,
            qo_indptr=indptr,
            kv_lens=kv_lens,
            page_size=table.page_size,
            max_q_len=1,
            max_kv_len=max_kv_len,
        ),
        logit_tokens=indptr[:count].long(),
        sampled_rows=long_rows,
        sample_positions=positions + 1,
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


def _view(values: array[int]) -> np.ndarray:
    return np.frombuffer(values, dtype=np.int32) if len(values) else _NO_IDS
