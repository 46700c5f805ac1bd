"""The CPU's op set in plain torch: what runs where no native kernel does.

Linear layers use oneDNN's prepacked weights (`mkldnn._reorder_linear_weight`): at the shapes of a
135M model a decode step's linears take 10 instead of 14 ms at one row and 17 instead of 34 ms at
24 rows (bfloat16, 2 cores of an EPYC Zen 4, torch 2.13), and the float32 ones half the time. In
bfloat16 the results are those of `F.linear` to the bit. The ops are private to torch, so a build
without them falls back to `F.linear`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops import kv_codes, reference
from ops.blocks.dense_mlp import act_and_mul
from ops.cpu import attention

if TYPE_CHECKING:
    from ops.decoder import CompiledDecoder, DecoderModel
    from ops.op_set import AttentionBatch, AttentionSpec, KvScales, Routing, SamplingTensors


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer's weight: oneDNN's opaque layout when `prepacked`, else [N, K]."""

    weight: Tensor
    bias: Tensor | None
    prepacked: bool


def prepack(weight: Tensor) -> Tensor | None:
    """The weight [N, K] in oneDNN's layout, or None where this torch cannot make or use it."""
    if weight.dtype not in (torch.bfloat16, torch.float32):
        return None
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        probe = torch.zeros(1, weight.shape[1], dtype=weight.dtype)
        torch.ops.mkldnn._linear_pointwise(probe, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):  # an absent op; a CPU without the instructions
        return None
    return packed


class CpuOps:
    """The operations on CPU tensors. Used by one thread at a time."""

    name = "cpu"

    def __init__(self) -> None:
        self._planner = attention.Planner()

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, *, quantization: str | None = None
    ) -> PackedLinear:
        if quantization is not None:
            raise ValueError(f"quantization {quantization!r}: the plain torch CPU ops have none")
        packed = prepack(weight)
        if packed is None:
            return PackedLinear(weight, bias, prepacked=False)
        return PackedLinear(packed, bias, prepacked=True)

    def embed(self, ids: Tensor, embedding: Any) -> Tensor:
        return F.embedding(ids, embedding)

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        if packed.prepacked:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, packed.weight, packed.bias, "none", [], ""
            )
            return out
        return F.linear(x, packed.weight, packed.bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed = F.rms_norm(x.to(weight.dtype), (x.shape[-1],), None, eps)
        return (normed * weight).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return reference.layer_norm(x, weight, eps)

    def rotary(
        self, q: Tensor, k: Tensor, positions: Tensor, rope: Tensor, *, interleaved: bool
    ) -> None:
        reference.rotary(q, k, positions, rope, interleaved=interleaved)

    def store_kv(
        self, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor,
        scales: KvScales | None = None,
    ) -> None:  # fmt: skip
        if int(slots.min()) < 0:
            reference.store_kv(k, v, k_pool, v_pool, slots, scales)
            return
        k_scales, v_scales = scales or (None, None)
        kv_codes.scatter(k, k_pool, k_scales, slots)
        kv_codes.scatter(v, v_pool, v_scales, slots)

    place_heads = reference.place_heads

    def extend_attention(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: AttentionBatch, spec: AttentionSpec,
        scales: KvScales | None = None,
    ) -> Tensor:  # fmt: skip
        plan = self._planner.plan(batch, spec.window, q.dtype)
        return attention.run(plan, q, k_pool, v_pool, spec, scales)

    decode_attention = extend_attention

    def mixed_attention(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: AttentionBatch, spec: AttentionSpec,
        scales: KvScales | None = None,
    ) -> Tensor:  # fmt: skip
        attend = self.extend_attention
        return reference.mixed_attention(q, k_pool, v_pool, batch, spec, scales, attend)

    causal_conv = staticmethod(reference.causal_conv)
    gated_delta = staticmethod(reference.gated_delta)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate.float()).mul_(up).to(x.dtype)

    def gelu_and_mul(self, x: Tensor, *, tanh: bool) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate.float(), approximate="tanh" if tanh else "none").mul_(up).to(x.dtype)

    def clamped_silu_and_mul(self, x: Tensor) -> Tensor:
        return reference.clamped_silu_and_mul(x)

    def route(
        self, logits: Tensor, routing: Routing, correction: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return reference.route(logits, routing, correction)

    pack_experts = reference.pack_experts_one_by_one

    def run_experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, packed: Any, activation: str
    ) -> Tensor:
        """Expert by expert, each for all of its tokens, so that its weights are read once. A
        token's sum runs through its experts in the order of their ids."""
        out = torch.zeros(x.shape, dtype=torch.float32)
        chosen, order = ids.flatten().sort(stable=True)
        counts = torch.bincount(chosen, minlength=len(packed)).tolist()
        tokens = (order // ids.shape[1]).split(counts)
        factors = weights.flatten()[order].split(counts)
        for (gate_up, down), rows, factor in zip(packed, tokens, factors, strict=True):
            if not rows.shape[0]:
                continue
            inner = act_and_mul(self.linear(x[rows], gate_up), activation, self)
            out.index_add_(0, rows, self.linear(inner, down).float() * factor[:, None])
        return out.to(x.dtype)

    def sample(self, logits: Tensor, s: SamplingTensors) -> Tensor:
        return reference.sample(logits, s)

    def compile(self, model: DecoderModel) -> CompiledDecoder | None:
        return None
