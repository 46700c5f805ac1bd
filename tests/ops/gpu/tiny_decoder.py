"""A tiny decoder of random weights on any op set, and a runner for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ops.blocks.attention import Attention
from ops.blocks.block import Block, Norm
from ops.blocks.dense_mlp import DenseMlp
from ops.decoder import DecoderModel
from ops.op_set import AttentionSpec
from runtime.config import SchedulerConfig
from runtime.execution.device import Device, Fence
from runtime.execution.model_runner import ModelRunner, RunnerSizes
from runtime.models.decoder import Decoder
from runtime.request import SamplingParams
from runtime.runner import SampleMasks
from runtime.scheduling.scheduler import Scheduler
from tests.runtime.execution.drivers import request, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ops.blocks.block import Mixer
    from ops.decoder import Backend
    from ops.op_set import OpSet
    from runtime.scheduling.schedule_batch import ScheduleBatch

VOCAB_SIZE, HIDDEN_SIZE, INTERMEDIATE_SIZE = 211, 48, 80
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
WINDOWS = (0, 24)  # by layer
PAGE_SIZE = 4
# Each way to sample, which has kernels of its own.
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, frequency_penalty=0.3),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=0.7, seed=1, repetition_penalty=1.2),
    SamplingParams(temperature=0.7, seed=1, top_k=4),
    SamplingParams(temperature=0.7, seed=1, min_p=0.1, presence_penalty=0.2),
    SamplingParams(temperature=0.0, logit_bias=((3, 1.0),), logprobs=2),
    SamplingParams(temperature=0.7, seed=1, top_p=0.9, min_tokens=3, stop_token_ids=frozenset({4})),
]


def make_device(ops: Backend, where: str = "cpu") -> Device:
    """A float32 device that computes with `ops`."""
    return Device(
        torch_device=torch.device(where),
        dtype=torch.float32,
        ops=ops,
        queued=False,
        pinned=False,
        graphs=False,
        memory_budget_bytes=None,
        description=where,
    )


class QueuedDevice(Device):
    """A CPU that is driven as a device that queues its work, as far as the order of calls goes."""

    def fence(self) -> Fence:
        return make_device(self.ops).fence()

    def stream(self) -> None:
        return None

    def probe(self) -> None:
        return


def make_queued_device(ops: Backend) -> QueuedDevice:
    """See `make_device`."""
    return queued(make_device(ops))


def queued(device: Device) -> QueuedDevice:
    fields = {name: getattr(device, name) for name in Device.__slots__}
    return QueuedDevice(**fields | {"queued": True})


def make_model(
    ops: OpSet,
    where: str = "cpu",
    *,
    context_length: int = 256,
    dtype: torch.dtype = torch.float32,
) -> DecoderModel:
    """The same random weights for every op set; a window in one layer and sinks in the other."""
    generator = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        weight = torch.randn(rows, columns, generator=generator) / columns**0.5
        return weight.to(where, dtype)

    def linear(rows: int, columns: int) -> Any:
        return ops.pack_linear(matrix(rows, columns))

    def vector(size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, generator=generator)).to(where, dtype)

    def norm(size: int) -> Norm:
        return Norm(vector(size), 1e-5)

    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(context_length)[:, None] * frequencies
    rope = torch.cat((angles.cos(), angles.sin()), dim=-1).to(where)

    def attention(window: int) -> Attention:
        return Attention(
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            qkv=linear((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN_SIZE),
            o=linear(HIDDEN_SIZE, HEADS * HEAD_DIM),
            spec=AttentionSpec(0.25, window=window, sinks=None if window else vector(HEADS)),
            rope=rope,
            q_norm=norm(HEAD_DIM),
            k_norm=norm(HEAD_DIM),
        )

    def mlp() -> DenseMlp:
        return DenseMlp(
            intermediate_size=INTERMEDIATE_SIZE,
            gate_up=linear(2 * INTERMEDIATE_SIZE, HIDDEN_SIZE),
            down=linear(HIDDEN_SIZE, INTERMEDIATE_SIZE),
            activation="silu",
        )

    def block(mixer: Mixer) -> Block:
        return Block(mixer=mixer, norm=norm(HIDDEN_SIZE))

    return DecoderModel(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        embedding=matrix(VOCAB_SIZE, HIDDEN_SIZE) * 7,
        layers=tuple((block(attention(window)), block(mlp())) for window in WINDOWS),
        final_norm=norm(HIDDEN_SIZE),
        lm_head=linear(VOCAB_SIZE, HIDDEN_SIZE),
    )


def make_runner(
    device: Device, *, rows: int = 8, total_tokens: int = 512, **options: Any
) -> ModelRunner:
    """A runner of the tiny decoder with pages of 4 tokens and a context of 256."""
    sizes = RunnerSizes(
        page_size=PAGE_SIZE, total_tokens=total_tokens, rows=rows, context_length=256
    )
    model = make_model(device.ops, str(device.torch_device), dtype=device.dtype)
    return ModelRunner(device, Decoder(model, device.ops), sizes, **options)


def serve_all_ways(runner: ModelRunner, samplings: Sequence[SamplingParams] = SAMPLINGS) -> None:
    """Prompts longer and shorter than a tile, one request at a time, then all together: each way to
    sample once by itself and once in steps of prompts beside decode rows."""
    requests = [
        (f"r{i}", list(range(1, 7 + 12 * i)), replace(sampling, max_new_tokens=5))
        for i, sampling in enumerate(samplings)
    ]
    for group in (*([one] for one in requests), requests):
        config = SchedulerConfig(
            capacity_tokens=512,
            context_length=256,
            page_size=PAGE_SIZE,
            max_running_requests=8,
            chunked_prefill_size=40,
        )
        made = [request(*one) for one in group]
        done = run(Scheduler(config), runner, made, masks=_first_row_masked)
        assert done.failed_steps == 0
        if len(made) > 1:
            assert done.steps["mixed"]
            assert done.steps["decode"]


def _first_row_masked(batch: ScheduleBatch) -> SampleMasks | None:
    words = np.full((1, (VOCAB_SIZE + 31) // 32), -1, dtype=np.int32)
    return SampleMasks([0], words) if len(batch.sampled) else None
