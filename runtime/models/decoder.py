"""Runs a decoder-only transformer, described as data, through any op set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from ops.op_set import DecoderSpec, DecoderStep, DecoderWeights, LayerWeights, OpSet


class Decoder:
    """A model ready to run: in one call where the op set compiles it, else op by op."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, ops: OpSet) -> None:
        self.spec = spec
        self.weights = weights
        self.ops = ops
        self.compiled = ops.compile(spec, weights)
        self._widths = (
            spec.num_heads * spec.head_dim,
            spec.num_kv_heads * spec.head_dim,
            spec.num_kv_heads * spec.head_dim,
        )

    def __call__(self, step: DecoderStep) -> Tensor:
        """Logits [N, V] float32 of `step.logit_tokens`, after storing K and V of all tokens."""
        if self.compiled is not None:
            return self.compiled(step)
        return self.logits(self.hidden(step))

    def hidden(self, step: DecoderStep) -> Tensor:
        """What `logits` takes, [N, H]: the normed output of the last layer. See `__call__`."""
        spec, weights, ops = self.spec, self.weights, self.ops
        residual = F.embedding(step.input_ids, weights.embedding)
        if spec.embed_scale != 1.0:
            residual = residual * spec.embed_scale
        x = ops.rms_norm(residual, weights.layers[0].input_norm, spec.rms_eps)
        for i, layer in enumerate(weights.layers):
            x = self._attention(x, step, step.caches[i], layer)
            x = self._branch(x, layer.attention_out_norm)
            x = ops.add_rms_norm(x, residual, layer.post_attention_norm, spec.rms_eps)
            x = self._branch(self._mlp(x, layer), layer.mlp_out_norm)
            if i + 1 < spec.num_layers:
                following = weights.layers[i + 1].input_norm
                x = ops.add_rms_norm(x, residual, following, spec.rms_eps)
        assert weights.final_norm is not None
        if not step.logit_tokens.shape[0]:  # a step of middle chunks only
            return x[:0]
        residual = residual.index_select(0, step.logit_tokens)
        x = x.index_select(0, step.logit_tokens)
        return ops.add_rms_norm(x, residual, weights.final_norm, spec.rms_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V] float32 for hidden states [N, H]."""
        spec = self.spec
        if not hidden.shape[0]:
            return hidden.new_empty((0, spec.vocab_size), dtype=torch.float32)
        logits = self.ops.linear(hidden, self.weights.lm_head).float()
        if spec.logit_scale != 1.0:
            logits = logits * spec.logit_scale
        if spec.logit_soft_cap > 0:
            logits = spec.logit_soft_cap * torch.tanh(logits / spec.logit_soft_cap)
        return logits

    def _attention(
        self, x: Tensor, step: DecoderStep, cache: tuple[Tensor, ...], layer: LayerWeights
    ) -> Tensor:
        spec, ops = self.spec, self.ops
        heads = (-1, spec.head_dim)
        flat_q, flat_k, flat_v = ops.linear(x, layer.qkv).split(self._widths, dim=-1)
        q, k = flat_q.unflatten(-1, heads), flat_k.unflatten(-1, heads)  # [T, H, D]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = ops.rms_norm(q, layer.q_norm, spec.rms_eps)
            k = ops.rms_norm(k, layer.k_norm, spec.rms_eps)
        if layer.rope is not None:
            ops.rotary(q, k, step.positions, layer.rope, interleaved=spec.rope_interleaved)
        k_pool, v_pool = cache
        ops.store_kv(k, flat_v.unflatten(-1, heads), k_pool, v_pool, step.slots)
        attend = ops.decode_attention if step.attention.max_q_len == 1 else ops.extend_attention
        out = attend(q, k_pool, v_pool, step.attention, layer.attention)
        return ops.linear(out.flatten(1), layer.o)

    def _mlp(self, x: Tensor, layer: LayerWeights) -> Tensor:
        ops = self.ops
        x = ops.linear(x, layer.gate_up)
        if self.spec.activation == "silu":
            x = ops.silu_and_mul(x)
        else:
            x = ops.gelu_and_mul(x, tanh=self.spec.activation == "gelu_tanh")
        return ops.linear(x, layer.down)

    def _branch(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """A branch's output as it is added to the residual."""
        if norm is not None:
            x = self.ops.rms_norm(x, norm, self.spec.rms_eps)
        return x if self.spec.residual_scale == 1.0 else x * self.spec.residual_scale
