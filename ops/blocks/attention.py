"""Causal self-attention over paged keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ops.op_set import HeadNorm, KvScales

if TYPE_CHECKING:
    from torch import Tensor

    from ops.blocks.block import DecoderStep, Norm, Weight
    from ops.op_set import AttentionBatch, AttentionSpec, OpSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention: q, k and v, rotary positions, the KV pool, softmax, o.

    Args:
        heads, kv_heads, head_dim: heads is a multiple of kv_heads.
        qkv: linear, H -> [q heads | k heads | v heads]. o: linear, q heads -> H.
        spec: scale, window, soft cap and sinks.
        rope: [max_positions, R] float32, cosines in the first half of a row and sines in the
            second, R at most head_dim; None: no rotary positions.
        q_norm, k_norm: of each head, before the rotary positions.
        qk_norm_whole: they are of all heads together instead (OLMo).
        gate: linear, H -> q heads: what o reads is multiplied by its sigmoid (Qwen 3 Next).
    """

    heads: int
    kv_heads: int
    head_dim: int
    qkv: Weight
    o: Weight
    spec: AttentionSpec
    rope: Weight | None
    rope_interleaved: bool = False
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    qk_norm_whole: bool = False
    gate: Weight | None = None

    @property
    def cache_shapes(self) -> tuple[tuple[int, ...], ...]:
        """K and V."""
        return ((self.kv_heads, self.head_dim),) * 2

    @property
    def widths(self) -> tuple[int, int, int]:
        """Columns of q, k and v in what `qkv` gives."""
        kv = self.kv_heads * self.head_dim
        return self.heads * self.head_dim, kv, kv

    def run(self, x: Tensor, cache: tuple[Tensor, ...], step: DecoderStep, ops: OpSet) -> Tensor:
        q, k, v = ops.linear(x, self.qkv).split(self.widths, dim=-1)
        if self.qk_norm_whole:
            q, k = (self._normed(x, norm, ops) for x, norm in ((q, self.q_norm), (k, self.k_norm)))
        k_pool, v_pool, *of_codes = cache
        scales = KvScales(*of_codes) if of_codes else None
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        q = ops.place_heads(
            q,
            k,
            v,
            k_pool,
            v_pool,
            step.positions,
            step.slots,
            q_norm=self._head_norm(self.q_norm),
            k_norm=self._head_norm(self.k_norm),
            rope=self.rope,
            interleaved=self.rope_interleaved,
            scales=scales,
        )
        out = attend(q, k_pool, v_pool, step.attention, self.spec, ops, scales).flatten(1)
        if self.gate is not None:
            out = out * ops.linear(x, self.gate).sigmoid()
        return ops.linear(out, self.o)

    def _normed(self, x: Tensor, norm: Norm | None, ops: OpSet) -> Tensor:
        return x if norm is None else ops.rms_norm(x, norm.weight, norm.eps)

    def _head_norm(self, norm: Norm | None) -> HeadNorm | None:
        if norm is None or self.qk_norm_whole:
            return None
        return HeadNorm(norm.weight, norm.eps)


def attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    batch: AttentionBatch,
    spec: AttentionSpec,
    ops: OpSet,
    scales: KvScales | None,
) -> Tensor:
    """The attention that a step's rows ask for, [T, HQ, D]."""
    if batch.decode is not None:
        return ops.mixed_attention(q, k_pool, v_pool, batch, spec, scales)
    if batch.max_q_len == 1:
        return ops.decode_attention(q, k_pool, v_pool, batch, spec, scales)
    return ops.extend_attention(q, k_pool, v_pool, batch, spec, scales)
