"""Turns a step's logits into token ids and log-probabilities, on the device.

The order of operations is the op set's (`ops.reference.sample`); here is what it is fed with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from runtime.execution.logprobs import LogprobTensors, logprobs_of
from runtime.execution.sampling_state import BIAS, LOGPROBS, MIN_TOKENS, SamplingState

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.execution.device import Device
    from runtime.execution.forward_batch import SampledRows
    from runtime.runner import SampleMasks
    from runtime.scheduling.schedule_batch import ScheduleBatch


@dataclass(slots=True)
class Sampled:
    """A step's choice, on the device.

    Args:
        token_ids: [S] int64, -1 where no token could be sampled.
        logprobs: of the rows `logprob_rows` (indices into the S), or None.
    """

    token_ids: Tensor
    logprobs: LogprobTensors | None
    logprob_rows: np.ndarray

    def to_host(self, device: Device) -> None:
        """Replaces the tensors by copies in host memory (see `Device.to_host`)."""
        self.token_ids = device.to_host(self.token_ids)
        if self.logprobs is not None:
            self.logprobs = self.logprobs.to_host(device)


class Sampler:
    """Samples steps in the order of their launch."""

    def __init__(
        self, device: Device, rows: int, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self.state = SamplingState(device, rows, vocab_size, eos_token_ids)
        self._ops = device.ops
        self._device = device

    def take_over(self, batch: ScheduleBatch) -> None:
        """Notes the parameters of the rows whose prompt ends in this step."""
        entries = [
            (batch.rows[row], batch.requests[row])
            for row in batch.sampled
            if row < batch.num_prefill
        ]
        self.state.set_rows(entries)

    def sample(
        self,
        batch: ScheduleBatch,
        sampled: SampledRows,
        logits: Tensor,
        masks: SampleMasks | None,
    ) -> Sampled:
        """Picks a token for each sampled row. logits: [S, V] float32, overwritten."""
        rows = np.frombuffer(batch.rows, dtype=np.int32)[
            np.frombuffer(batch.sampled, dtype=np.int32)
        ]
        row_flags = self.state.flags[rows]
        flags = int(np.bitwise_or.reduce(row_flags))
        tensors = self.state.gather(sampled.rows, sampled.positions, flags)
        if flags & BIAS:
            tensors.bias = self._bias(rows)
        if flags & MIN_TOKENS:
            tensors.banned = self._bans(batch, rows, row_flags, masks)
        if masks is not None and len(masks.rows):
            tensors.mask_rows = self._device.upload(np.array(masks.rows, dtype=np.int64))
            tensors.mask_bits = self._device.upload(_mask_bits(masks))
        # Log-probabilities are those of the raw distribution, and `sample` may overwrite it.
        logprob_rows = np.flatnonzero(row_flags & LOGPROBS)
        raw = None
        if len(logprob_rows):
            raw = logits.index_select(0, self._device.upload(logprob_rows))
        token_ids = self._ops.sample(logits, tensors)
        logprobs = None
        if raw is not None:
            chosen = token_ids.index_select(0, self._device.upload(logprob_rows))
            top = int(self.state.logprobs[rows[logprob_rows]].max())
            logprobs = logprobs_of(raw, chosen, top)
        return Sampled(token_ids, logprobs, logprob_rows)

    def _bias(self, rows: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        at, tokens, values = [], [], []
        for i, row in enumerate(rows.tolist()):
            if self.state.flags[row] & BIAS:
                row_tokens, row_values = self.state.bias[row]
                at.append(np.full(len(row_tokens), i, dtype=np.int64))
                tokens.append(row_tokens)
                values.append(row_values)
        parts = (np.concatenate(part) for part in (at, tokens, values))
        row_index, token, value = (self._device.upload(part) for part in parts)
        return row_index, token, value

    def _bans(
        self,
        batch: ScheduleBatch,
        rows: np.ndarray,
        row_flags: np.ndarray,
        masks: SampleMasks | None,
    ) -> tuple[Tensor, Tensor] | None:
        """The ids that would end a row before its min_tokens, None if there are none."""
        at, tokens = [], []
        for i in np.flatnonzero(row_flags & MIN_TOKENS).tolist():
            row = int(rows[i])
            banned = self.state.banned[row]
            if batch.output_counts[i] >= self.state.min_tokens[row]:
                continue
            if _grammar_needs(masks, i, banned):
                continue
            at.append(np.full(len(banned), i, dtype=np.int64))
            tokens.append(banned)
        if not at:
            return None
        return self._device.upload(np.concatenate(at)), self._device.upload(np.concatenate(tokens))


def _mask_bits(masks: SampleMasks) -> np.ndarray:
    """[len(rows), words] int32."""
    bits = np.frombuffer(masks.bits, dtype=np.int32).copy()
    return bits.reshape(len(masks.rows), -1)


def _grammar_needs(masks: SampleMasks | None, i: int, banned: np.ndarray) -> bool:
    """Whether the grammar of sampled row i allows nothing but banned ids: then it wins over
    min_tokens, since a complete document cannot be continued."""
    if masks is None or i not in masks.rows:
        return False
    left = _mask_bits(masks)[list(masks.rows).index(i)].view(np.uint32)
    np.bitwise_and.at(left, banned // 32, ~(np.uint32(1) << (banned % 32).astype(np.uint32)))
    return not left.any()
