"""A tiny decoder of random weights on any op set, and a runner for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ops.op_set import AttentionSpec, DecoderSpec, DecoderWeights, LayerWeights
from runtime.execution.device import Device
from runtime.execution.model_runner import ModelRunner, RunnerSizes
from runtime.models.decoder import Decoder

if TYPE_CHECKING:
    from ops.op_set import OpSet

SPEC = DecoderSpec(
    vocab_size=211,
    hidden_size=48,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=80,
    rms_eps=1e-5,
    scale=0.25,
    rotary_dim=16,
    windows=(0, 24),
    qk_norm=True,
)
PAGE_SIZE = 4


def make_device(ops: OpSet, where: str = "cpu") -> Device:
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


def make_weights(ops: OpSet, where: str = "cpu", *, context_length: int = 256) -> DecoderWeights:
    """The same random weights for every op set; a window in one layer and sinks in the other."""
    generator = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        weight = torch.randn(rows, columns, generator=generator) / columns**0.5
        return weight.to(where)

    def linear(rows: int, columns: int) -> Any:
        return ops.pack_linear(matrix(rows, columns))

    def norm(size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, generator=generator)).to(where)

    spec = SPEC
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    frequencies = 10000.0 ** (-torch.arange(0, spec.rotary_dim, 2) / spec.rotary_dim)
    angles = torch.arange(context_length)[:, None] * frequencies
    rope = torch.cat((angles.cos(), angles.sin()), dim=-1).to(where)
    embedding = matrix(spec.vocab_size, spec.hidden_size) * 7
    layers = [
        LayerWeights(
            input_norm=norm(spec.hidden_size),
            qkv=linear(q_size + 2 * kv_size, spec.hidden_size),
            o=linear(spec.hidden_size, q_size),
            post_attention_norm=norm(spec.hidden_size),
            gate_up=linear(2 * spec.intermediate_size, spec.hidden_size),
            down=linear(spec.hidden_size, spec.intermediate_size),
            rope=rope,
            attention=AttentionSpec(
                spec.scale, window=window, sinks=None if window else norm(spec.num_heads)
            ),
            q_norm=norm(spec.head_dim),
            k_norm=norm(spec.head_dim),
        )
        for window in spec.windows
    ]
    return DecoderWeights(
        embedding=embedding,
        layers=layers,
        final_norm=norm(spec.hidden_size),
        lm_head=linear(spec.vocab_size, spec.hidden_size),
    )


def make_runner(
    device: Device, *, rows: int = 8, total_tokens: int = 512, **options: Any
) -> ModelRunner:
    """A runner of the tiny decoder with pages of 4 tokens and a context of 256."""
    sizes = RunnerSizes(
        page_size=PAGE_SIZE, total_tokens=total_tokens, rows=rows, context_length=256
    )
    weights = make_weights(device.ops, str(device.torch_device))
    return ModelRunner(device, Decoder(SPEC, weights, device.ops), sizes, **options)
