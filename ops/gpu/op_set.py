"""The GPU's op set: Triton kernels, and cuBLAS through torch for the linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops import reference
from ops.gpu import coded_linear
from ops.gpu.activation import gelu_and_mul, silu_and_mul
from ops.gpu.decode_attention import decode_attention
from ops.gpu.experts import pack_experts, run_experts
from ops.gpu.extend_attention import extend_attention
from ops.gpu.mixed_attention import mixed_attention
from ops.gpu.place_heads import place_heads
from ops.gpu.recurrent import causal_conv, gated_delta
from ops.gpu.rms_norm import add_rms_norm, rms_norm
from ops.gpu.rotary import rotary
from ops.gpu.sampling import sample
from ops.gpu.store_kv import store_kv
from ops.op_set import GroupedWeight, PackedEmbedding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ops.decoder import CompiledDecoder, DecoderModel
    from ops.op_set import Expert


MOST_HEAD_DIM = 256  # wider tiles do not fit into shared memory


class GpuOps:
    """The operations on CUDA tensors; on CPU tensors as well under TRITON_INTERPRET=1."""

    name = "gpu"

    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    layer_norm = staticmethod(reference.layer_norm)
    rotary = staticmethod(rotary)
    store_kv = staticmethod(store_kv)
    extend_attention = staticmethod(extend_attention)
    decode_attention = staticmethod(decode_attention)
    place_heads = staticmethod(place_heads)
    mixed_attention = staticmethod(mixed_attention)
    causal_conv = staticmethod(causal_conv)
    gated_delta = staticmethod(gated_delta)
    silu_and_mul = staticmethod(silu_and_mul)
    gelu_and_mul = staticmethod(gelu_and_mul)
    clamped_silu_and_mul = staticmethod(reference.clamped_silu_and_mul)
    route = staticmethod(reference.route)
    sample = staticmethod(sample)

    def pack_linear(
        self,
        weight: Tensor | GroupedWeight,
        bias: Tensor | None = None,
        *,
        quantization: str | None = None,
    ) -> Any:
        """A tensor as it is: cuBLAS reads [N, K] rows. Raises ValueError on a quantization."""
        if quantization is not None:
            raise ValueError(f"quantization {quantization!r}: the GPU op set has none")
        if isinstance(weight, GroupedWeight):
            return coded_linear.pack(weight, bias)
        return weight, bias

    def embed(self, ids: Tensor, embedding: Any) -> Tensor:
        if isinstance(embedding, PackedEmbedding):
            rows = coded_linear.unpacked_rows(ids, embedding.linear)
            return rows.to(getattr(torch, embedding.dtype))
        return F.embedding(ids, embedding)

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        if isinstance(packed, coded_linear.CodedLinear):
            return coded_linear.coded_linear(x, packed)
        weight, bias = packed
        return F.linear(x, weight, bias)

    def pack_experts(self, experts: Iterable[Expert], *, quantization: str | None = None) -> Any:
        """Raises ValueError on a quantization."""
        if quantization is not None:
            raise ValueError(f"quantization {quantization!r}: the GPU op set has none")
        return pack_experts(experts)

    def run_experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, packed: Any, activation: str
    ) -> Tensor:
        return run_experts(x, ids, weights, packed, activation, self)

    def compile(self, model: DecoderModel) -> CompiledDecoder | None:
        """None: a step runs op by op, or what it captured so is replayed as a CUDA graph.

        Raises:
            ValueError: an attention's heads are wider than the kernels' tiles.
        """
        for block in model.blocks:
            widest = max((shape[-1] for shape in block.mixer.cache_shapes), default=0)
            if widest > MOST_HEAD_DIM:
                raise ValueError(
                    f"its attention has heads of {widest}, the kernels have up to {MOST_HEAD_DIM}"
                )
        return None
