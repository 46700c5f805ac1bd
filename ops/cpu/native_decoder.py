"""A whole decoder stack as one native call (csrc/decoder.cpp)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ops.cpu import structs
from ops.cpu.arguments import (
    FLOATS,
    NativeLinear,
    attention_struct,
    batch_struct,
    head_dim_fits,
)
from ops.cpu.library import ACTIVATIONS, TYPES, Library, check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ops.op_set import DecoderSpec, DecoderStep, DecoderWeights, LayerWeights

# Gate and up are computed in pairs of whole panels.
_PANEL = 16


def fits(spec: DecoderSpec, weights: DecoderWeights) -> bool:
    """Whether the native step covers this model; if not, it runs op by op."""
    linears = [weights.lm_head]
    for layer in weights.layers:
        linears += [layer.qkv, layer.o, layer.gate_up, layer.down]
    return (
        all(isinstance(linear, NativeLinear) for linear in linears)
        and weights.embedding.dtype in FLOATS
        and weights.final_norm is not None
        and spec.intermediate_size % _PANEL == 0
        and head_dim_fits(spec.head_dim)
        and spec.activation in ACTIVATIONS
    )


class NativeDecoder:
    """See `ops.op_set.CompiledDecoder`. Keeps the weights it points to alive.

    Between linear layers everything is float32: only inputs of linear layers, queries and what
    goes to the pool are rounded, so results are closer to float32 ones than an op by op bfloat16
    run. A token's result depends on its own sequence alone, to the bit.
    """

    def __init__(self, library: Library, spec: DecoderSpec, weights: DecoderWeights) -> None:
        # May have more rows than ids that can be sampled.
        check("embedding", weights.embedding, (None, spec.hidden_size), *FLOATS)
        self._library = library
        self._spec = spec
        self._kept: list[Any] = [weights.embedding, weights.lm_head]
        self._layers = (structs.Layer * spec.num_layers)(
            *(self._layer(layer) for layer in weights.layers)
        )
        self._pools = (structs.Pools * spec.num_layers)()
        self._caches: Sequence[tuple[Tensor, ...]] | None = None
        self._pool_slots = 0
        assert weights.final_norm is not None  # `fits` was asked
        self._decoder = structs.Decoder(
            vocab=spec.vocab_size,
            hidden=spec.hidden_size,
            layers=spec.num_layers,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            intermediate=spec.intermediate_size,
            rotary_dim=spec.rotary_dim,
            embedding_type=TYPES[weights.embedding.dtype],
            activation=ACTIVATIONS[spec.activation],
            rope_interleaved=spec.rope_interleaved,
            eps=spec.rms_eps,
            embed_scale=spec.embed_scale,
            logit_scale=spec.logit_scale,
            residual_scale=spec.residual_scale,
            logit_soft_cap=spec.logit_soft_cap,
            embedding=weights.embedding.data_ptr(),
            embedding_rows=weights.embedding.shape[0],
            layer=self._layers,
            final_norm=self._float("final_norm", weights.final_norm, spec.hidden_size),
            lm_head=self._linear("lm_head", weights.lm_head, spec.vocab_size, spec.hidden_size),
        )

    def __call__(self, step: DecoderStep) -> Tensor:
        tokens = step.input_ids.shape[0]
        for name in ("input_ids", "positions", "slots"):
            check(name, getattr(step, name), (tokens,), torch.int64)
        check("logit_tokens", step.logit_tokens, (None,), torch.int64)
        if self._caches is not step.caches:
            self._take_caches(step.caches)
        wanted = step.logit_tokens.shape[0]
        out = torch.empty((wanted, self._spec.vocab_size), dtype=torch.float32)
        if tokens:
            struct = structs.Step(
                *(batch_struct(step.attention, tokens), step.input_ids.data_ptr()),
                *(step.positions.data_ptr(), step.slots.data_ptr()),
                *(step.logit_tokens.data_ptr(), wanted),
                *(self._pools, self._pool_slots, out.data_ptr()),
            )
            self._library.call("loom_decode_step", self._decoder, struct)
        return out

    def _take_caches(self, caches: Sequence[tuple[Tensor, ...]]) -> None:
        """Checks and remembers the pools, which stay the same for the life of a runner."""
        spec = self._spec
        if len(caches) != spec.num_layers:
            raise ValueError(f"caches: {len(caches)}, expected one per layer, {spec.num_layers}")
        first = caches[0][0]
        shape = (first.shape[0], spec.num_kv_heads, spec.head_dim)
        check("caches[0][0]", first, shape, *FLOATS)
        for i, cache in enumerate(caches):
            for j, pool in enumerate(cache):
                check(f"caches[{i}][{j}]", pool, shape, first.dtype)
                # A step reads rows scattered over the pools.
                self._library.use_large_pages(pool)
            self._pools[i] = structs.Pools(*(pool.data_ptr() for pool in cache))
        self._decoder.pool_type = TYPES[first.dtype]
        self._pool_slots = shape[0]
        self._caches = caches

    def _layer(self, layer: LayerWeights) -> structs.Layer:
        spec = self._spec
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        hidden, inner = spec.hidden_size, spec.intermediate_size
        out = structs.Layer(
            qkv=self._linear("qkv", layer.qkv, q_width + 2 * kv_width, hidden),
            o=self._linear("o", layer.o, hidden, q_width),
            gate_up=self._linear("gate_up", layer.gate_up, 2 * inner, hidden),
            down=self._linear("down", layer.down, hidden, inner),
            input_norm=self._float("input_norm", layer.input_norm, hidden),
            post_attention_norm=self._float("norm", layer.post_attention_norm, hidden),
        )
        for name, size in (
            ("q_norm", spec.head_dim),
            ("k_norm", spec.head_dim),
            ("attention_out_norm", hidden),
            ("mlp_out_norm", hidden),
        ):
            norm = getattr(layer, name)
            if norm is not None:
                setattr(out, name, self._float(name, norm, size))
        if layer.rope is not None:
            check("rope", layer.rope, (None, spec.rotary_dim), torch.float32)
            self._kept.append(layer.rope)
            out.rope, out.rope_positions = layer.rope.data_ptr(), layer.rope.shape[0]
        sinks = layer.attention.sinks
        if sinks is not None:
            sinks = sinks.float().contiguous()
            self._kept.append(sinks)
        out.attention = attention_struct(layer.attention, sinks, spec.num_heads)
        return out

    def _linear(self, name: str, packed: NativeLinear, n: int, k: int) -> structs.Linear:
        if (packed.n, packed.k) != (n, k):
            raise ValueError(f"{name}: weight [{packed.n}, {packed.k}], expected [{n}, {k}]")
        self._kept.append(packed)
        return packed.struct()

    def _float(self, name: str, tensor: Tensor, size: int) -> int:
        """The address of a float32 copy that lives as long as this object."""
        check(name, tensor, (size,), *FLOATS)
        copy = tensor.float().contiguous()
        self._kept.append(copy)
        return copy.data_ptr()
