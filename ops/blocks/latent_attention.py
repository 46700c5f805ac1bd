"""Attention over a latent of each token that all heads share (MLA: DeepSeek-V2, arXiv:2405.04434).

Published as: a latent c [L] and a rotary key r [R] per token; head h has the key (U_h c, r) and the
value V_h c. Here U_h goes to the query's side and V_h behind the softmax, which is the same sum:

    q . (U c, r) = (U^T q_plain, q_rotary) . (c, r)        sum_j w_j V c_j = V sum_j w_j c_j

So what is kept of a token is (c, r) alone, one head of L + R for all query heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ops.blocks.attention import attend
from ops.op_set import KvScales

if TYPE_CHECKING:
    from torch import Tensor

    from ops.blocks.block import DecoderStep, Norm, Weight
    from ops.op_set import AttentionSpec, OpSet


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """See the module's docstring.

    Args:
        heads, plain_dim, rotary_dim: of the heads; latent: L.
        q_a: linear, H -> Q, and its norm [Q]; None: the queries are not compressed.
        q_b: linear, Q (or H) -> heads of (plain | rotary).
        kv_a: linear, H -> (latent | rotary). kv_norm: of the latent [L].
        k_up: [heads, plain_dim, L]. v_up: [heads, V, L], V the dim of a value.
        o: linear, heads of V -> H.
        rope: see `Attention`.
    """

    heads: int
    plain_dim: int
    rotary_dim: int
    latent: int
    q_a: Weight | None
    q_norm: Norm | None
    q_b: Weight
    kv_a: Weight
    kv_norm: Norm
    k_up: Weight
    v_up: Weight
    o: Weight
    spec: AttentionSpec
    rope: Weight
    rope_interleaved: bool

    @property
    def cache_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The latent and the rotary key, as one head."""
        return ((1, self.latent + self.rotary_dim),)

    def run(self, x: Tensor, cache: tuple[Tensor, ...], step: DecoderStep, ops: OpSet) -> Tensor:
        q, key = self._queries(x, ops), self._key(x, ops)
        ops.rotary(
            q[..., self.latent :],
            key[..., self.latent :],
            step.positions,
            self.rope,
            interleaved=self.rope_interleaved,
        )
        pool, *of_codes = cache
        scales = KvScales(*of_codes, *of_codes) if of_codes else None
        ops.store_kv(key, key, pool, pool, step.slots, scales)
        mixed = attend(q, pool, pool, step.attention, self.spec, ops, scales)[..., : self.latent]
        out = torch.einsum("thl,hvl->thv", mixed, self.v_up)
        return ops.linear(out.flatten(1), self.o)

    def _queries(self, x: Tensor, ops: OpSet) -> Tensor:
        """[T, heads, latent + rotary]."""
        if self.q_a is not None and self.q_norm is not None:
            x = ops.rms_norm(ops.linear(x, self.q_a), self.q_norm.weight, self.q_norm.eps)
        q = ops.linear(x, self.q_b).view(x.shape[0], self.heads, -1)
        plain, rotary = q.split((self.plain_dim, self.rotary_dim), dim=-1)
        return torch.cat((torch.einsum("thp,hpl->thl", plain, self.k_up), rotary), dim=-1)

    def _key(self, x: Tensor, ops: OpSet) -> Tensor:
        """[T, 1, latent + rotary]."""
        latent, rotary = ops.linear(x, self.kv_a).split((self.latent, self.rotary_dim), dim=-1)
        latent = ops.rms_norm(latent, self.kv_norm.weight, self.kv_norm.eps)
        return torch.cat((latent, rotary), dim=-1)[:, None]
