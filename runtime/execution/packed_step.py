"""A step as one array of ints: what a device that queues its work is given, in a single copy.

Decode rows come first, one token each, then the prompts' tokens, then padding. So decode rows are
the head of every tensor of the step, however many there are, and a captured step of a fixed shape
serves any division of its tokens:

    token   0 ... D - 1    D ... T - 1           T ... shape.tokens - 1
            decode rows    prompts, one by one   padding: request row 0, position 0

Padding writes the first slot of the reserved page and reads no other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from ops.blocks.block import DecoderStep
from ops.op_set import AttentionBatch

if TYPE_CHECKING:
    from array import array

    from runtime.execution.kv_pool import StepMemory
    from runtime.scheduling.schedule_batch import ScheduleBatch

NO_INTS = np.empty(0, dtype=np.int32)
_NEWEST = -1  # in the place of an id: the newest token of the request row

Ints = TypeVar("Ints", np.ndarray, Tensor)


@dataclass(frozen=True, slots=True, order=True)
class PackedShape:
    """How much a step holds, padding included.

    Args:
        tokens: new tokens. decode_rows, prompts: rows of each kind. logits: tokens with logits.
    """

    tokens: int
    decode_rows: int
    prompts: int
    logits: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the parts of a packed step, in the order of the fields of `PackedStep`."""
        tokens, rows, prompts = self.tokens, self.decode_rows, self.prompts
        return tokens, tokens, tokens, rows, rows, prompts, prompts + 1, prompts, self.logits


def packed_shape(batch: ScheduleBatch, prompt_tokens: int = 0) -> PackedShape:
    """The shape without padding. prompt_tokens: that need logits beside the sampled ones."""
    return PackedShape(
        tokens=batch.prefill_tokens + batch.num_decode,
        decode_rows=batch.num_decode,
        prompts=batch.num_prefill,
        logits=len(batch.sampled) + prompt_tokens,
    )


@dataclass(frozen=True, slots=True)
class PackedStep(Generic[Ints]):
    """The parts of a packed step: int32 views of one array, on the host or on the device.

    Args:
        ids: [tokens], -1 for the newest token of the request row. positions, token_rows: [tokens].
        decode_rows, decode_kv_lens: [decode_rows] request rows; keys, the new token included.
        rows, qo_indptr, kv_lens: of the prompts, as in `AttentionBatch`.
        logit_tokens: [logits], tokens whose logits are wanted.
    """

    ids: Ints
    positions: Ints
    token_rows: Ints
    decode_rows: Ints
    decode_kv_lens: Ints
    rows: Ints
    qo_indptr: Ints
    kv_lens: Ints
    logit_tokens: Ints

    @classmethod
    def of(cls, packed: Ints, shape: PackedShape) -> PackedStep[Ints]:
        parts, begin = [], 0
        for size in shape.sizes:
            parts.append(packed[begin : begin + size])
            begin += size
        return cls(*parts)


def empty_step(shape: PackedShape) -> np.ndarray:
    """A packed step of padding alone."""
    packed = np.zeros(sum(shape.sizes), dtype=np.int32)
    parts = PackedStep.of(packed, shape)
    parts.decode_kv_lens.fill(1)
    parts.kv_lens.fill(1)
    return packed


def pack_step(
    batch: ScheduleBatch, shape: PackedShape, prompt_tokens: np.ndarray = NO_INTS
) -> np.ndarray:
    """The step, packed into a shape that holds it.

    Args:
        prompt_tokens: indices of the tokens that need logits beside the sampled ones, counted as
            the batch has its tokens: without its decode rows.
    """
    packed = empty_step(shape)
    step = PackedStep.of(packed, shape)
    count, decoding = batch.num_prefill, batch.num_decode
    rows, starts, lengths = view(batch.rows), view(batch.prefix_lens), view(batch.extend_lens)
    prompt_lengths = lengths[:count]
    ends = np.cumsum(prompt_lengths, dtype=np.int32) + np.int32(decoding)
    end = decoding + batch.prefill_tokens

    step.ids[:decoding] = _NEWEST
    step.ids[decoding:end] = view(batch.input_ids)
    step.token_rows[:decoding] = step.decode_rows[:decoding] = rows[count:]
    step.token_rows[decoding:end] = np.repeat(rows[:count], prompt_lengths)
    step.positions[:decoding] = starts[count:]
    step.decode_kv_lens[:decoding] = starts[count:] + 1
    step.positions[decoding:end] = prompt_positions(batch)
    step.rows[:count] = rows[:count]
    step.kv_lens[:count] = starts[:count] + prompt_lengths
    step.qo_indptr[0] = decoding
    step.qo_indptr[1 : count + 1] = ends
    step.qo_indptr[count + 1 :] = end
    last_tokens = np.concatenate((ends - 1, np.arange(decoding, dtype=np.int32)))
    wanted = np.concatenate((last_tokens[view(batch.sampled)], prompt_tokens + decoding))
    step.logit_tokens[: len(wanted)] = wanted
    return packed


def prompt_positions(batch: ScheduleBatch) -> np.ndarray:
    """[n] of the prompts' tokens."""
    starts, lengths = view(batch.prefix_lens), view(batch.extend_lens)
    starts, lengths = starts[: batch.num_prefill], lengths[: batch.num_prefill]
    positions = np.arange(batch.prefill_tokens, dtype=np.int32)
    positions += np.repeat(starts - (np.cumsum(lengths, dtype=np.int32) - lengths), lengths)
    return positions


def unpack_step(
    packed: Tensor, shape: PackedShape, memory: StepMemory, *, max_q_len: int, max_kv_len: int
) -> DecoderStep:
    """A packed step on the device as the decoder takes it.

    No value is read by the host, so a CUDA graph can capture it over static memory.

    Args: max_q_len, max_kv_len: upper bounds, see `AttentionBatch`.
    """
    step, table = PackedStep.of(packed, shape), memory.block_table
    positions = step.positions.long()
    newest = memory.next_tokens.index_select(0, step.token_rows)
    attention = AttentionBatch(
        block_table=table.pages,
        rows=step.rows,
        qo_indptr=step.qo_indptr,
        kv_lens=step.kv_lens,
        page_size=table.page_size,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
    )
    if shape.decode_rows:
        decode = AttentionBatch(
            block_table=table.pages,
            rows=step.decode_rows,
            qo_indptr=torch.arange(shape.decode_rows + 1, dtype=torch.int32, device=packed.device),
            kv_lens=step.decode_kv_lens,
            page_size=table.page_size,
            max_q_len=1,
            max_kv_len=max_kv_len,
        )
        attention = replace(attention, decode=decode) if shape.prompts else decode
    return DecoderStep(
        input_ids=torch.where(step.ids < 0, newest, step.ids),
        positions=positions,
        slots=table.slots(step.token_rows, positions),
        attention=attention,
        logit_tokens=step.logit_tokens.long(),
        caches=memory.pool.caches,
    )


def view(values: array[int]) -> np.ndarray:
    """The ints without a copy."""
    return np.frombuffer(values, dtype=np.int32) if len(values) else NO_INTS
