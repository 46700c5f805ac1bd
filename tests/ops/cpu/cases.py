"""Batches, models and comparisons that the native kernels' tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ops.blocks.attention import Attention
from ops.blocks.block import Block, DecoderStep, Norm
from ops.blocks.dense_mlp import DenseMlp
from ops.decoder import DecoderModel
from ops.op_set import AttentionSpec
from scripts._paged import paged_batch

if TYPE_CHECKING:
    from torch import Tensor

    from ops.op_set import OpSet

DTYPES = (torch.float32, torch.bfloat16)
DTYPE_IDS = ("f32", "bf16")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def elementwise_error(got: Tensor, want: Tensor) -> float:
    """The largest difference of an element, relative to it, or to 1 where it is smaller."""
    return float(((got.double() - want.double()).abs() / want.double().abs().clamp(min=1)).max())


def rope_table(positions: int, dim: int) -> Tensor:
    angles = torch.arange(positions)[:, None] * 1e4 ** (-torch.arange(0, dim, 2) / dim)
    return torch.cat((angles.cos(), angles.sin()), dim=1).float()


# A model in numbers, and what the families differ in as changes to them. What stands in a tuple is
# per layer, so that the layers of one model differ.
TINY: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "heads": (6, 6),
    "kv_heads": (2, 2),
    "head_dim": (16, 16),
    "intermediate_size": (80, 80),
    "eps": 1e-5,
    "scale": 0.25,
    "windows": (0, 0),
    "rotary_dims": (16, 16),
    "rope_interleaved": False,
    "activations": ("silu", "silu"),
    "soft_caps": (0.0, 0.0),
    "qk_norm": False,
    "qk_norm_whole": False,
    "pre_norms": True,
    "post_norms": False,
    "parallel": False,
    "residual_scale": 1.0,
    "embed_scale": 1.0,
    "logit_scale": 1.0,
    "logit_soft_cap": 0.0,
    "sinks": False,
    "bias": False,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"qk_norm": True},
    "gemma3": {
        "qk_norm": True,
        "post_norms": True,
        "activations": ("gelu_tanh", "gelu_tanh"),
        "windows": (7, 0),
        "embed_scale": 6.5,
    },
    "gemma2": {
        "post_norms": True,
        "activations": ("gelu_tanh", "gelu_tanh"),
        "soft_caps": (2.0, 2.0),
        "logit_soft_cap": 1.5,
    },
    "granite": {"residual_scale": 0.3, "logit_scale": 0.2, "embed_scale": 3.0, "scale": 0.1},
    "gelu": {"rope_interleaved": True, "activations": ("gelu", "gelu")},
    "partial_rope": {"rotary_dims": (6, 0)},
    "olmo2": {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_whole": True},
    "unlike_layers": {
        "heads": (6, 4),
        "kv_heads": (2, 4),
        "head_dim": (16, 24),
        "intermediate_size": (80, 32),
        "windows": (0, 5),
        "rotary_dims": (16, 8),
        "activations": ("silu", "gelu"),
        "soft_caps": (0.0, 3.0),
    },
}


def tiny_model(
    ops: OpSet,
    dtype: torch.dtype,
    *,
    quantization: str | None = None,
    matrix_dtype: torch.dtype | None = None,
    **changes: Any,
) -> DecoderModel:
    """`TINY` with changes. Random weights, the same for every op set.

    Args: matrix_dtype: of the linear layers' weights; None: `dtype`.
    """
    shape = TINY | changes
    rand, hidden = generator(7), shape["hidden_size"]

    def tensor(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*sizes, generator=rand) * scale).to(dtype)

    def linear(n: int, k: int) -> Any:
        weight = tensor(n, k, scale=k**-0.5).to(matrix_dtype or dtype)
        added = tensor(n, scale=0.1)  # drawn always, so that every variant has the same weights
        return ops.pack_linear(weight, added if shape["bias"] else None, quantization=quantization)

    def norm(size: int, wanted: bool = True) -> Norm | None:
        weight = 1 + tensor(size, scale=0.1)
        return Norm(weight, shape["eps"]) if wanted else None

    def block(mixer: Any, **options: Any) -> Block:
        return Block(
            mixer=mixer,
            norm=norm(hidden, shape["pre_norms"]),
            out_norm=norm(hidden, shape["post_norms"]),
            residual_scale=shape["residual_scale"],
            **options,
        )

    def attention(i: int) -> Attention:
        heads, kv_heads, dim = (shape[name][i] for name in ("heads", "kv_heads", "head_dim"))
        sinks = torch.randn(heads, generator=rand)
        rotary_dim, whole = shape["rotary_dims"][i], shape["qk_norm_whole"]
        return Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            qkv=linear((heads + 2 * kv_heads) * dim, hidden),
            o=linear(hidden, heads * dim),
            spec=AttentionSpec(
                shape["scale"],
                shape["windows"][i],
                shape["soft_caps"][i],
                sinks if shape["sinks"] else None,
            ),
            rope=rope_table(600, rotary_dim) if rotary_dim else None,
            rope_interleaved=shape["rope_interleaved"],
            q_norm=norm(heads * dim if whole else dim, shape["qk_norm"]),
            k_norm=norm(kv_heads * dim if whole else dim, shape["qk_norm"]),
            qk_norm_whole=whole,
        )

    def mlp(i: int) -> DenseMlp:
        inner = shape["intermediate_size"][i]
        return DenseMlp(
            intermediate_size=inner,
            gate_up=linear(2 * inner, hidden),
            down=linear(hidden, inner),
            activation=shape["activations"][i],
        )

    embedding = tensor(shape["vocab_size"], hidden)
    layers = tuple(
        (block(attention(i)), block(mlp(i), parallel=shape["parallel"])) for i in range(2)
    )
    final_norm = norm(hidden)
    assert final_norm is not None
    return DecoderModel(
        vocab_size=shape["vocab_size"],
        hidden_size=hidden,
        embedding=embedding,
        layers=layers,
        final_norm=final_norm,
        lm_head=linear(shape["vocab_size"], hidden),
        **{name: shape[name] for name in ("embed_scale", "logit_scale", "logit_soft_cap")},
    )


def empty_caches(model: DecoderModel, slots: int, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """Pools full of NaN: what is read without having been written shows."""
    return [
        tuple(
            torch.full((slots, *shape), float("nan"), dtype=dtype)
            for shape in block.mixer.cache_shapes
        )
        for block in model.blocks
    ]


def prefill_step(
    model: DecoderModel, rows: list[tuple[int, int]], dtype: torch.dtype, seed: int = 0
) -> DecoderStep:
    """A step of rows (kv_len, new tokens) with random ids, logits of every token, empty caches."""
    batch, positions, slots, size = paged_batch(rows, 16)
    tokens = positions.shape[0]
    return DecoderStep(
        input_ids=torch.randint(0, model.vocab_size, (tokens,), generator=generator(seed)),
        positions=positions,
        slots=slots,
        attention=batch,
        logit_tokens=torch.arange(tokens),
        caches=empty_caches(model, size, dtype),
    )
