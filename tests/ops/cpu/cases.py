"""Batches, models and comparisons that the native kernels' tests share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ops.op_set import (
    AttentionBatch,
    AttentionSpec,
    DecoderSpec,
    DecoderStep,
    DecoderWeights,
    LayerWeights,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ops.op_set import OpSet

DTYPES = (torch.float32, torch.bfloat16)
DTYPE_IDS = ("f32", "bf16")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def paged_batch(
    rows: list[tuple[int, int]], page_size: int, seed: int = 0
) -> tuple[AttentionBatch, Tensor, Tensor, int]:
    """A batch of rows (kv_len, new tokens) on shuffled pages.

    Returns: the batch, the new tokens' positions and slots [T], and the slots of the pool.
    """
    pages = [-(-kv // page_size) for kv, _ in rows]
    order = torch.randperm(sum(pages), generator=generator(seed)) + 1
    # Columns past a row's pages name pages outside the pool: they must never be followed.
    table = torch.full((len(rows) + 1, max(pages) + 1), 2**30, dtype=torch.int32)
    positions, slots, at = [], [], 0
    for row, (kv_len, new) in enumerate(rows, start=1):
        table[row, : pages[row - 1]] = order[at : at + pages[row - 1]].int()
        at += pages[row - 1]
        position = torch.arange(kv_len - new, kv_len)
        positions.append(position)
        slots.append(table[row, position // page_size].long() * page_size + position % page_size)
    batch = AttentionBatch(
        block_table=table,
        rows=torch.arange(1, len(rows) + 1, dtype=torch.int32),
        qo_indptr=torch.tensor([0] + [new for _, new in rows]).cumsum(0).int(),
        kv_lens=torch.tensor([kv for kv, _ in rows], dtype=torch.int32),
        page_size=page_size,
        max_q_len=max(new for _, new in rows),
        max_kv_len=max(kv for kv, _ in rows),
    )
    return batch, torch.cat(positions), torch.cat(slots), (sum(pages) + 1) * page_size


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to 1 for small values."""
    return float(((got.double() - want.double()).abs() / want.double().abs().clamp(min=1)).max())


def rope_table(positions: int, dim: int) -> Tensor:
    angles = torch.arange(positions)[:, None] * 1e4 ** (-torch.arange(0, dim, 2) / dim)
    return torch.cat((angles.cos(), angles.sin()), dim=1).float()


TINY = DecoderSpec(
    vocab_size=101,
    hidden_size=48,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=80,
    rms_eps=1e-5,
    scale=0.25,
    rotary_dim=16,
    windows=(0, 0),
    rope_layers=(True, True),
)

# What the families differ in, each as changes to `TINY` and to its layers.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"qk_norm": True},
    "gemma3": {
        "qk_norm": True,
        "post_norms": True,
        "activation": "gelu_tanh",
        "windows": (7, 0),
        "embed_scale": 6.5,
    },
    "gemma2": {
        "post_norms": True,
        "activation": "gelu_tanh",
        "attention_soft_cap": 2.0,
        "logit_soft_cap": 1.5,
    },
    "granite": {"residual_scale": 0.3, "logit_scale": 0.2, "embed_scale": 3.0, "scale": 0.1},
    "cohere": {"rope_interleaved": True, "activation": "gelu"},
    "partial_rope": {"rotary_dim": 6, "rope_layers": (True, False)},
}


def tiny_spec(variant: str) -> DecoderSpec:
    return replace(TINY, **VARIANTS[variant])


def tiny_weights(
    ops: OpSet,
    spec: DecoderSpec,
    dtype: torch.dtype,
    *,
    sinks: bool = False,
    bias: bool = False,
    quantization: str | None = None,
) -> DecoderWeights:
    """Random weights, the same for every op set."""
    rand = generator(7)

    def tensor(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=rand) * scale).to(dtype)

    def linear(n: int, k: int) -> Any:
        weight = tensor(n, k, scale=k**-0.5)
        added = tensor(n, scale=0.1)  # drawn always, so that every variant has the same weights
        return ops.pack_linear(weight, added if bias else None, quantization=quantization)

    def norm(n: int, wanted: bool = True) -> Tensor | None:
        weight = 1 + tensor(n, scale=0.1)
        return weight if wanted else None

    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    rope = rope_table(600, spec.rotary_dim)
    weights = DecoderWeights(embedding=tensor(spec.vocab_size, spec.hidden_size))
    for i in range(spec.num_layers):
        sink = torch.randn(spec.num_heads, generator=rand)
        weights.layers.append(
            LayerWeights(
                input_norm=norm(spec.hidden_size),
                qkv=linear(q + 2 * kv, spec.hidden_size),
                o=linear(spec.hidden_size, q),
                post_attention_norm=norm(spec.hidden_size),
                gate_up=linear(2 * spec.intermediate_size, spec.hidden_size),
                down=linear(spec.hidden_size, spec.intermediate_size),
                rope=rope if spec.rope_layers[i] else None,
                attention=AttentionSpec(
                    spec.scale,
                    spec.windows[i],
                    spec.attention_soft_cap,
                    sink if sinks else None,
                ),
                q_norm=norm(spec.head_dim, spec.qk_norm),
                k_norm=norm(spec.head_dim, spec.qk_norm),
                attention_out_norm=norm(spec.hidden_size, spec.post_norms),
                mlp_out_norm=norm(spec.hidden_size, spec.post_norms),
            )
        )
    weights.final_norm = norm(spec.hidden_size)
    weights.lm_head = linear(spec.vocab_size, spec.hidden_size)
    return weights


def empty_caches(spec: DecoderSpec, slots: int, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """Pools full of NaN: what is read without having been written shows."""
    shape = (slots, spec.num_kv_heads, spec.head_dim)
    return [
        tuple(torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
        for _ in range(spec.num_layers)
    ]


def prefill_step(
    spec: DecoderSpec, rows: list[tuple[int, int]], dtype: torch.dtype, seed: int = 0
) -> DecoderStep:
    """A step of rows (kv_len, new tokens) with random ids, logits of every token, empty caches."""
    batch, positions, slots, size = paged_batch(rows, 16)
    tokens = positions.shape[0]
    return DecoderStep(
        input_ids=torch.randint(0, spec.vocab_size, (tokens,), generator=generator(seed)),
        positions=positions,
        slots=slots,
        attention=batch,
        logit_tokens=torch.arange(tokens),
        caches=empty_caches(spec, size, dtype),
    )
