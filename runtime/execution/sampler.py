"""Turns a step's logits into token ids and log-probabilities, on the device.

The order of operations is the op set's (`ops.reference.sample`); here is what it is fed with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ops.op_set import Penalties, SamplingTensors
from runtime.execution.logprobs import LogprobTensors, logprobs_of

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.execution.device import Device
    from runtime.execution.forward_batch import SampledRows
    from runtime.request import Request, SamplingParams
    from runtime.runner import SampleMasks
    from runtime.scheduling.schedule_batch import ScheduleBatch


# What a row needs beyond picking the largest logit; a step does only what one of its rows needs.
RANDOM, FILTER, PENALTY, BIAS, MIN_TOKENS, LOGPROBS = 1, 2, 4, 8, 16, 32

_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")


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
        """Picks a token for each sampled row. logits: [S, V], see `OpSet.sample`."""
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


class SamplingState:
    """What sampling needs to know of each request row: tables on the host (`flags`, and what bans
    and log-probabilities need) and on the device (everything else).

    A row's parameters are written once, in the step that samples its first token (the last chunk
    of its prompt, also after a retraction), so a decode step only gathers them. Penalty counts live
    here too: `OpSet.sample` counts its own choice, so they never lag behind the newest token.
    """

    def __init__(
        self, device: Device, rows: int, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        """rows: of the block table, the reserved row 0 included."""
        self._device = device
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self.flags = np.zeros(rows, dtype=np.uint8)
        self.min_tokens = np.zeros(rows, dtype=np.int32)
        self.logprobs = np.zeros(rows, dtype=np.int32)
        self.banned: dict[int, np.ndarray] = {}  # ids that end the request, by row
        self.bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._floats = self._zeros(len(_FLOATS), rows, dtype=torch.float32)
        self._top_k = self._zeros(rows, dtype=torch.int32)
        self._seeds = self._zeros(rows, dtype=torch.int64)
        # A row that ever had a penalty keeps its place in the two state tables.
        self._state_rows = self._zeros(rows, dtype=torch.int32).fill_(-1)
        self._state_of: dict[int, int] = {}
        self._prompt_mask = self._zeros(0, vocab_size, dtype=torch.bool)
        self._output_counts = self._zeros(0, vocab_size, dtype=torch.int32)

    def _zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device.torch_device)

    def set_rows(self, entries: list[tuple[int, Request]]) -> None:
        """Takes over the parameters of requests whose next sampled token is their first (or the
        first since a retraction)."""
        if not entries:
            return
        rows = np.array([row for row, _ in entries], dtype=np.int64)
        floats = np.empty((len(_FLOATS), len(entries)), dtype=np.float32)
        top_k = np.empty(len(entries), dtype=np.int32)
        seeds = np.empty(len(entries), dtype=np.int64)
        states = np.empty(len(entries), dtype=np.int32)
        for i, (row, request) in enumerate(entries):
            p = request.sampling
            floats[:, i] = (
                p.temperature,
                p.top_p,
                p.min_p,
                p.repetition_penalty,
                p.presence_penalty,
                p.frequency_penalty,
            )
            top_k[i] = min(p.top_k, self._vocab_size)
            seeds[i] = _as_int64(p.seed or 0)
            self._set_host(row, p)
            states[i] = self._set_penalties(row, request) if self.flags[row] & PENALTY else -1
        at = self._device.upload(rows)
        self._floats.index_copy_(1, at, self._device.upload(floats))
        self._top_k.index_copy_(0, at, self._device.upload(top_k))
        self._seeds.index_copy_(0, at, self._device.upload(seeds))
        self._state_rows.index_copy_(0, at, self._device.upload(states))

    def _set_host(self, row: int, p: SamplingParams) -> None:
        flags = 0
        if p.temperature > 0:
            flags |= RANDOM
            if p.top_k > 0 or p.top_p < 1 or p.min_p > 0:
                flags |= FILTER
        if p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty:
            flags |= PENALTY
        bias = [(t, b) for t, b in p.logit_bias if 0 <= t < self._vocab_size]
        if bias:
            flags |= BIAS
            self.bias[row] = (
                np.array([t for t, _ in bias], dtype=np.int64),
                np.array([b for _, b in bias], dtype=np.float32),
            )
        if p.min_tokens > 0:
            flags |= MIN_TOKENS
            ends = p.stop_token_ids | (frozenset() if p.ignore_eos else self._eos)
            self.banned[row] = np.array(
                sorted(t for t in ends if 0 <= t < self._vocab_size), dtype=np.int64
            )
        if p.logprobs is not None:
            flags |= LOGPROBS
        self.flags[row] = flags
        self.min_tokens[row] = p.min_tokens
        self.logprobs[row] = p.logprobs or 0

    def _set_penalties(self, row: int, request: Request) -> int:
        """The row's place in the state tables, filled from its prompt and committed outputs."""
        state = self._state_of.setdefault(row, len(self._state_of))
        if state >= self._prompt_mask.shape[0]:
            self._grow(min(max(4, 2 * state), len(self.flags)))
        prompt = np.array(request.input_ids, dtype=np.int64)
        outputs = np.array(request.output_ids, dtype=np.int64)
        self._prompt_mask[state] = False
        self._prompt_mask[state, self._device.upload(prompt[prompt < self._vocab_size])] = True
        counts = np.bincount(outputs, minlength=self._vocab_size).astype(np.int32)
        self._output_counts[state] = self._device.upload(counts[: self._vocab_size])
        return state

    def _grow(self, rows: int) -> None:
        mask, counts = self._prompt_mask, self._output_counts
        self._prompt_mask = self._zeros(rows, self._vocab_size, dtype=torch.bool)
        self._output_counts = self._zeros(rows, self._vocab_size, dtype=torch.int32)
        self._prompt_mask[: mask.shape[0]] = mask
        self._output_counts[: counts.shape[0]] = counts

    def gather(self, rows: Tensor, positions: Tensor, flags: int) -> SamplingTensors:
        """The parameters of the rows to sample, by device operations alone.

        Args:
            rows: [S] int64, request rows. positions: [S] int64, tokens before the one sampled.
            flags: those of all the rows together.
        """
        temperature, top_p, min_p, repetition, presence, frequency = self._floats.index_select(
            1, rows
        )
        penalties = None
        if flags & PENALTY:
            penalties = Penalties(
                state_rows=self._state_rows.index_select(0, rows),
                repetition=repetition,
                presence=presence,
                frequency=frequency,
                prompt_mask=self._prompt_mask,
                output_counts=self._output_counts,
            )
        return SamplingTensors(
            temperature=temperature,
            top_k=self._top_k.index_select(0, rows),
            top_p=top_p,
            min_p=min_p,
            seed=self._seeds.index_select(0, rows),
            position=positions,
            all_greedy=not flags & RANDOM,
            any_filter=bool(flags & FILTER),
            penalties=penalties,
        )


def state_bytes(rows: int, vocab_size: int) -> int:
    """Device memory of a `SamplingState` whose every row has penalties: its two large tables."""
    return rows * vocab_size * (torch.bool.itemsize + torch.int32.itemsize)


def _as_int64(seed: int) -> int:
    """The low 64 bits of a seed, as a signed number."""
    return ((seed + 2**63) % 2**64) - 2**63
