"""Runs a scheduler's steps on a device: owns weights, KV pool, block table and sampler."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from runtime.execution.forward_batch import (
    ForwardBatch,
    Staging,
    decode_step,
    make_forward_batch,
    make_replay_batch,
    prompt_token_indices,
    upload_step,
)
from runtime.execution.kv_pool import BlockTable, KVPool, StepMemory, bytes_per_state
from runtime.execution.launchers import Launcher, StreamLauncher, ThreadLauncher
from runtime.execution.logprobs import LogprobTensors, concatenate, logprobs_of, records
from runtime.execution.packed_step import NO_INTS, unpack_step
from runtime.execution.sampler import Sampled, Sampler
from runtime.execution.state_rows import StateRows
from runtime.runner import RunnerInfo, StepOutput
from runtime.scheduling.schedule_batch import ScheduleBatch

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.execution.device import Device, Fence
    from runtime.execution.forward_batch import SampledRows
    from runtime.execution.long_prompt_rows import LongPromptRows
    from runtime.execution.packed_step import PackedShape
    from runtime.models.decoder import Decoder
    from runtime.runner import LaunchedStep, SampleMasks

# Tokens whose logits are made at once for prompt log-probabilities: bounds [n, V] float32.
_PROMPT_SLICE = 256
# A compiled decoder makes all of a step's logits at once; beyond this the step runs op by op.
_COMPILED_PROMPT_ROWS = 1024
# Of a row whose recurrent state is computed again, at once.
_STATE_TOKENS = 512
_NOTHING_LEFT = (
    "no token could be sampled: the model's logits hold a NaN, or bias, bans and grammar together"
    " leave no token"
)


class DecodeGraphs(Protocol):
    """Captured decode steps."""

    def holds(self, rows: int) -> bool:
        """Whether some captured size holds a decode step of so many rows."""
        ...

    def replay(self, rows: Tensor, kv_lens: Tensor) -> Tensor:
        """Logits [B, V] of a decode step that `holds` (valid until the next replay), K and
        V stored. rows: [B] int32, request rows. kv_lens: [B] int32, the new token included."""
        ...


class MixedGraphs(Protocol):
    """Captured steps with prompts."""

    def padded_shape(self, tokens: int, rows: int) -> PackedShape | None:
        """The captured shape for a step; None: there is none that holds it."""
        ...

    def replay(self, packed: Tensor, shape: PackedShape) -> Tensor:
        """Logits [shape.logits, V] of a step packed into such a shape (valid until the
        next replay of any step), K and V stored."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSizes:
    """How large the runner's tables are.

    Args:
        total_tokens: KV tokens of the pool, whole pages, the reserved page included.
        rows: requests that may hold KV at once.
        state_slots: recurrent states that are kept beside those of the rows.
    """

    page_size: int
    total_tokens: int
    rows: int
    context_length: int
    state_slots: int = 0


class ModelRunner:
    """A `runtime.runner.Runner` that computes."""

    def __init__(
        self,
        device: Device,
        decoder: Decoder,
        sizes: RunnerSizes,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        graphs: DecodeGraphs | None = None,
        mixed_graphs: MixedGraphs | None = None,
        long_prompts: LongPromptRows | None = None,
    ) -> None:
        self.device = device
        self.decoder = decoder
        self.sizes = sizes
        self.graphs = graphs
        self.mixed_graphs = mixed_graphs
        where = device.torch_device
        recurrent = bytes_per_state(decoder.model) > 0
        self.memory = StepMemory(
            BlockTable(sizes.rows, sizes.context_length, sizes.page_size, where),
            KVPool(
                decoder.model,
                sizes.total_tokens,
                device=where,
                dtype=device.kv_dtype,
                states=sizes.rows + 1 + sizes.state_slots,
            ),
            torch.zeros(sizes.rows + 1, dtype=torch.int64, device=where),
            long_prompts,
            StateRows(device) if recurrent else None,
        )
        self.sampler = Sampler(device, sizes.rows + 1, decoder.model.vocab_size, eos_token_ids)
        self.staging = Staging(device)
        self.info = RunnerInfo(
            max_total_tokens=sizes.total_tokens,
            vocab_size=decoder.model.vocab_size,
            chunk_tokens=device.chunk_tokens,
            long_prompts=None if long_prompts is None else long_prompts.long_prompts,
            state_slots=sizes.state_slots if recurrent else None,
            details={
                "device": device.description,
                "dtype": str(device.dtype).removeprefix("torch."),
                "weights": device.form,
                "kv_dtype": str(device.kv_dtype).removeprefix("torch."),
                "ops": device.ops.name,
                "decoder": "op by op" if decoder.compiled is None else "compiled",
            },
        )
        self.last_end: Fence | None = None  # of the last step that has sampled
        self._launcher: Launcher = StreamLauncher(device) if device.queued else ThreadLauncher()

    def launch(self, batch: ScheduleBatch) -> LaunchedStep:
        """Starts a step and returns at once."""
        return self._launcher.launch(ModelStep(self, batch))

    def probe(self) -> None:
        """Blocks until the device has shown that it computes; then steps are run again after one
        that failed. Raises what it raises."""
        self.device.probe()
        self._launcher.failed = False

    def close(self) -> None:
        """Waits for launched steps. Idempotent."""
        self._launcher.close()

    def restore(self, batch: ScheduleBatch) -> None:
        """Sets anew what is kept of the rows that a step is to restore, from the tokens that they
        have now: a step that failed, or was taken back, may have changed it."""
        if self.memory.states is not None:
            for request in batch.restore:
                self._compute_state(batch, batch.requests.index(request))
        begun = [request for request in batch.restore if request.output_ids]
        if not begun:
            return
        self.sampler.state.set_rows([(request.row, request) for request in begun])
        rows = np.array([request.row for request in begun], dtype=np.int64)
        newest = np.array([request.output_ids[-1] for request in begun], dtype=np.int64)
        upload = self.device.upload
        self.memory.next_tokens.index_copy_(0, upload(rows), upload(newest))

    def _compute_state(self, batch: ScheduleBatch, row: int) -> None:
        """Computes the recurrent state of a row of a step from all tokens before that step. Of
        the KV that this gives nothing is kept: what is in the row's pages stays as it is."""
        request, end = batch.requests[row], batch.prefix_lens[row]
        staging = self.staging if self.device.queued else None
        for start in range(0, end, _STATE_TOKENS):
            tokens = request.tokens_between(start, min(start + _STATE_TOKENS, end))
            piece = ScheduleBatch(
                step=batch.step,
                num_prefill=1,
                requests=[request],
                rows=array("i", [batch.rows[row]]),
                prefix_lens=array("i", [start]),
                extend_lens=array("i", [len(tokens)]),
                input_ids=tokens,
                table_rows=batch.table_rows,
                table_indices=batch.table_indices,
                table_pages=batch.table_pages,
            )
            step = make_forward_batch(piece, NO_INTS, staging, self.memory).step
            self.decoder.hidden(replace(step, slots=torch.zeros_like(step.slots)))

    def decode_logits(self, rows: Tensor, kv_lens: Tensor, max_kv_len: int) -> Tensor:
        """Logits [B, V] of a decode step given by device tensors alone: what a graph captures.

        Args: see `decode_step`.
        """
        return self.decoder(decode_step(rows, kv_lens, self.memory, max_kv_len))

    def packed_logits(self, packed: Tensor, shape: PackedShape) -> Tensor:
        """Logits [shape.logits, V] of a packed step on the device: what a graph captures."""
        return self.decoder(
            unpack_step(
                packed,
                shape,
                self.memory,
                max_q_len=shape.tokens,
                max_kv_len=self.sizes.context_length,
            )
        )

    def take_tokens(self, sampled: SampledRows, token_ids: Tensor) -> None:
        """Notes the sampled tokens [S] as the newest of their rows; a failed row (-1) gets 0, a
        token like any other, since its next step may be launched before its end is known."""
        self.memory.next_tokens.index_copy_(0, sampled.rows, token_ids.clamp(min=0))


class ModelStep:
    """One step of a `ModelRunner`, in three parts: forward, sample, output."""

    def __init__(self, runner: ModelRunner, batch: ScheduleBatch) -> None:
        self._runner = runner
        self._batch = batch
        self._sampled_rows: SampledRows
        self._logits: Tensor
        self._prompt_counts: list[tuple[int, int]] = []
        self._prompt: LogprobTensors | None = None
        self._sampled: Sampled
        self._fences: list[Fence]
        self._before: Fence | None = None
        self._compiled_kernels = 0

    def forward(self) -> None:
        """Runs or queues the model, up to the logits."""
        # Made here, where what they raise fails this step and none that was launched before it.
        self._fences = [self._runner.device.fence() for _ in range(4)]
        self._before = self._runner.last_end
        self._compiled_kernels -= self._runner.device.compiled_kernels()
        self._fences[0].record()
        self._runner.restore(self._batch)
        self._logits = self._make_logits()
        self._fences[1].record()

    @property
    def quick(self) -> bool:
        """A captured step holds it."""
        return self._captured is not None

    @cached_property
    def _captured(self) -> DecodeGraphs | tuple[MixedGraphs, PackedShape] | None:
        """What holds it: captured decode steps, or a captured shape of steps with prompts."""
        runner, batch = self._runner, self._batch
        if not batch.num_prefill:
            graphs = runner.graphs
            return graphs if graphs is not None and graphs.holds(len(batch.rows)) else None
        mixed, long_prompts = runner.mixed_graphs, runner.memory.long_prompts
        if mixed is None or (long_prompts is not None and long_prompts.any_in(batch)):
            return None
        prompts = batch.requests[: batch.num_prefill]
        if any(request.sampling.prompt_logprobs is not None for request in prompts):
            return None
        shape = mixed.padded_shape(batch.prefill_tokens + batch.num_decode, len(batch.rows))
        return None if shape is None else (mixed, shape)

    def _make_logits(self) -> Tensor:
        captured = self._captured
        if self._batch.num_prefill:
            self._runner.sampler.take_over(self._batch)
        if captured is None:
            return self._eager_logits()
        if isinstance(captured, tuple):
            return self._replayed_mixed_logits(*captured)
        return self._replayed_logits(captured)

    def _prepared(self) -> None:
        """The model comes next. What a queued device waits for until here is the host's time, not
        its own; where the host is the device, all of it is."""
        if self._runner.device.queued:
            self._fences[0].record()

    def _replayed_logits(self, graphs: DecodeGraphs) -> Tensor:
        runner = self._runner
        rows, kv_lens, sampled = make_replay_batch(self._batch, runner.staging, runner.memory)
        self._sampled_rows = sampled
        self._prepared()
        return graphs.replay(rows, kv_lens)

    def _replayed_mixed_logits(self, graphs: MixedGraphs, shape: PackedShape) -> Tensor:
        runner = self._runner
        packed, sampled = upload_step(self._batch, shape, runner.staging, runner.memory)
        self._sampled_rows = sampled
        self._prepared()
        return graphs.replay(packed, shape)[: len(self._batch.sampled)]

    def _eager_logits(self) -> Tensor:
        runner, batch = self._runner, self._batch
        prompt_tokens, self._prompt_counts = prompt_token_indices(batch)
        staging = runner.staging if runner.device.queued else None
        forward = make_forward_batch(batch, prompt_tokens, staging, runner.memory)
        self._sampled_rows = forward.sampled
        self._prepared()
        if len(prompt_tokens):
            return self._with_prompt_logprobs(forward, len(prompt_tokens))
        return runner.decoder(forward.step)

    def _with_prompt_logprobs(self, forward: ForwardBatch, count: int) -> Tensor:
        """The sampled rows' logits; the `count` others become log-probabilities, in slices."""
        decoder = self._runner.decoder
        sampled = len(self._batch.sampled)
        if decoder.compiled is not None and count <= _COMPILED_PROMPT_ROWS:
            rows = decoder(forward.step)
            logits = rows[:sampled]
            slices = iter(rows[sampled:].split(_PROMPT_SLICE))
        else:
            hidden = decoder.hidden(forward.step)
            logits = decoder.logits(hidden[:sampled])
            slices = map(decoder.logits, hidden[sampled:].split(_PROMPT_SLICE))
        following = self._following_tokens().split(_PROMPT_SLICE)
        top = max(self._wanted(row) for row, _ in self._prompt_counts)
        self._prompt = concatenate(
            [logprobs_of(part, ids, top) for part, ids in zip(slices, following, strict=True)]
        )
        return logits

    def _wanted(self, row: int) -> int:
        return self._batch.requests[row].sampling.prompt_logprobs or 0

    def _following_tokens(self) -> Tensor:
        """The prompt token after each token of `prompt_token_indices`, [n] int64."""
        ids: list[int] = []
        for row, count in self._prompt_counts:
            start = self._batch.prefix_lens[row] + 1
            ids.extend(self._batch.requests[row].input_ids[start : start + count])
        return self._runner.device.upload(np.array(ids, dtype=np.int64))

    def sample(self, masks: SampleMasks | None) -> None:
        """Picks the tokens, notes them in `next_tokens` and starts their way to the host."""
        runner = self._runner
        self._fences[2].record()
        if len(self._batch.sampled):
            rows = self._sampled_rows
            self._sampled = runner.sampler.sample(self._batch, rows, self._logits, masks)
            runner.take_tokens(rows, self._sampled.token_ids)
            self._sampled.to_host(runner.device)
        if self._prompt is not None:
            self._prompt = self._prompt.to_host(runner.device)
        self._fences[3].record()
        runner.last_end = self._fences[3]
        self._compiled_kernels += runner.device.compiled_kernels()

    def output(self) -> StepOutput:
        """Blocks until the step is done."""
        self._fences[3].synchronize()
        forward_start, forward_end, sample_start, sample_end = self._fences
        output = StepOutput(
            token_ids=[],
            device_s=forward_end.seconds_since(forward_start)
            + sample_end.seconds_since(sample_start),
            compiled_kernels=self._compiled_kernels,
        )
        if self._before is not None:
            output.idle_s = forward_start.seconds_since(self._before)
        if len(self._batch.sampled):
            output.token_ids = self._sampled.token_ids.tolist()
            output.failed = {i: _NOTHING_LEFT for i, t in enumerate(output.token_ids) if t < 0}
            self._add_logprobs(output)
        self._add_prompt_logprobs(output)
        return output

    def _add_logprobs(self, output: StepOutput) -> None:
        sampled = self._sampled
        if sampled.logprobs is None:
            return
        places = sampled.logprob_rows.tolist()
        requests = [self._batch.requests[self._batch.sampled[i]] for i in places]
        counts = [request.sampling.logprobs or 0 for request in requests]
        output.logprobs = [None] * len(output.token_ids)
        for i, record in zip(places, records(sampled.logprobs, counts), strict=True):
            output.logprobs[i] = record

    def _add_prompt_logprobs(self, output: StepOutput) -> None:
        if self._prompt is None:
            output.prompt_logprobs = {row: [] for row, _ in self._prompt_counts}
            return
        wanted = [self._wanted(row) for row, count in self._prompt_counts for _ in range(count)]
        made = records(self._prompt, wanted)
        first = 0
        for row, count in self._prompt_counts:
            output.prompt_logprobs[row] = made[first : first + count]
            first += count
