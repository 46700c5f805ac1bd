"""Gated delta net: linear attention whose state forgets, and corrects what it holds (Yang et al.
2024, arXiv:2412.06464), in the form of Qwen 3 Next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from ops.blocks.block import DecoderStep, Norm, Weight
    from ops.op_set import OpSet


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNet:
    """q, k, v; a short convolution along the tokens; the gated delta rule; a gated norm; out.

    Of each row it keeps the convolution's last inputs, and a matrix per value head.

    Args:
        key_heads, value_heads: each of the former serves as many neighbours of the latter.
        key_dim, value_dim: of a head.
        kernel: tokens that the convolution sees.
        qkvz: linear, H -> [q | k | v | z], heads of keys, keys, values and values.
        rates: linear, H -> [b | a], value heads each.
        conv: [kernel, channels of q, k and v] float32.
        a_log, dt_bias: [value_heads] float32: a token's decay is -exp(a_log) softplus(a + dt_bias).
        norm: of each value head, before the gate silu(z).
        out: linear, value heads -> H.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    qkvz: Weight
    rates: Weight
    conv: Weight
    a_log: Weight
    dt_bias: Weight
    norm: Norm
    out: Weight

    @property
    def cache_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Nothing is kept by token."""
        return ()

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Inputs of the convolution, and what the delta rule has written."""
        matrices = (self.value_heads, self.key_dim, self.value_dim)
        return (self.kernel - 1, sum(self.widths)), matrices

    @property
    def widths(self) -> tuple[int, int, int]:
        """Columns of q, k and v; z has those of v."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    def run(self, x: Tensor, cache: tuple[Tensor, ...], step: DecoderStep, ops: OpSet) -> Tensor:
        batch, (inputs, matrices) = step.recurrent, cache
        assert batch is not None
        qkv, z = ops.linear(x, self.qkvz).split((sum(self.widths), self.widths[-1]), dim=-1)
        mixed = F.silu(ops.causal_conv(qkv, self.conv, inputs, batch))
        q, k, v = mixed.split(self.widths, dim=-1)
        b, a = ops.linear(x, self.rates).float().chunk(2, dim=-1)
        heads = ops.gated_delta(
            q.unflatten(-1, (self.key_heads, self.key_dim)),
            k.unflatten(-1, (self.key_heads, self.key_dim)),
            v.unflatten(-1, (self.value_heads, self.value_dim)),
            -self.a_log.exp() * F.softplus(a + self.dt_bias),
            b.sigmoid(),
            matrices,
            batch,
        ).to(x.dtype)
        normed = ops.rms_norm(heads, self.norm.weight, self.norm.eps).flatten(1)
        return ops.linear((normed * F.silu(z.float())).to(x.dtype), self.out)
