"""The CPU's op set on native kernels (`csrc/`): checked calls, one ctypes call per operation.

What the kernels do not have (float16 activations, odd head dimensions) is left to the plain torch
ops that this class extends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ops.coded_weight import CodedWeight
from ops.cpu import native_codes, native_experts, native_recurrent
from ops.cpu.arguments import (
    FLOATS,
    POOLS,
    NativeLinear,
    attention_struct,
    batch_struct,
    check,
    head_dim_fits,
    pools_struct,
    sampling_struct,
)
from ops.cpu.library import ACTIVATIONS, KINDS, TYPES, Library
from ops.cpu.native_decoder import NativeDecoder, fits
from ops.cpu.native_experts import NativeExperts
from ops.cpu.op_set import CpuOps
from ops.op_set import PackedEmbedding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ops.decoder import CompiledDecoder, DecoderModel
    from ops.op_set import (
        AttentionBatch,
        AttentionSpec,
        Expert,
        KvScales,
        RecurrentBatch,
        SamplingTensors,
    )


class PanelMemory:
    """Hands out memory for panels from a few large blocks on large pages.

    A block is freed when the last tensor cut from it is. Small weights with pages of their own
    would lie on 4 KiB pages, and streaming them misses the TLB all the time.
    """

    BLOCK_BYTES = 64 << 20
    LARGE_PAGE_BYTES = 2 << 20

    def __init__(self, library: Library) -> None:
        self._library = library
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, count: int) -> Tensor:
        """A [count] uint8 tensor of undefined content, aligned to a cache line."""
        if count > self._rest.shape[0]:
            size = max(count, self.BLOCK_BYTES) + self.LARGE_PAGE_BYTES
            block = torch.empty(size, dtype=torch.uint8)
            block = block[-block.data_ptr() % self.LARGE_PAGE_BYTES :]
            self._library.use_large_pages(block)
            self._rest = block
        taken, self._rest = self._rest[:count], self._rest[(count + 63) // 64 * 64 :]
        return taken


class NativeOps(CpuOps):
    """The operations on CPU tensors. Used by one thread at a time."""

    name = "cpu-native"

    def __init__(self, library: Library) -> None:
        super().__init__()
        self.library = library
        self.memory = PanelMemory(library)

    def pack_linear(
        self,
        weight: Tensor | CodedWeight,
        bias: Tensor | None = None,
        *,
        quantization: str | None = None,
    ) -> Any:
        if isinstance(weight, CodedWeight):
            if quantization is not None:
                raise ValueError(f"quantization {quantization!r} of a weight of integers")
            bias = None if bias is None else _checked_bias(bias, weight.n)
            return native_codes.pack(self.library, self.memory.take, weight, bias)
        if quantization not in (None, "int8", "int4"):
            raise ValueError(f"quantization {quantization!r}: expected None, 'int8' or 'int4'")
        if quantization is not None and weight.dtype == torch.float16:
            weight = weight.float()
        check("weight", weight, (None, None), *FLOATS, torch.float16, strided=True)
        n, k = weight.shape
        if n == 0 or k == 0:
            raise ValueError(f"weight: shape {[n, k]}, expected at least one row and one column")
        bias = None if bias is None else _checked_bias(bias, n)
        kind = quantization or str(weight.dtype).removeprefix("torch.")
        panels = self.memory.take(self.library.packed_bytes(KINDS[kind], n, k))
        self.library.call(
            "loom_pack",
            *(KINDS[kind], weight.data_ptr(), TYPES[weight.dtype], n, k),
            *(weight.stride(0), panels.data_ptr()),
        )
        return NativeLinear(panels, bias, n, k, kind)

    def embed(self, ids: Tensor, embedding: Any) -> Tensor:
        if not isinstance(embedding, PackedEmbedding):
            return super().embed(ids, embedding)
        rows, dtype = embedding.linear, getattr(torch, embedding.dtype)
        check("ids", ids, (None,), torch.int64)
        out = torch.empty((ids.shape[0], rows.k), dtype=dtype)
        self.library.call(
            "loom_unpack_rows",
            *(rows.struct(), ids.data_ptr(), ids.shape[0], TYPES[dtype], out.data_ptr()),
        )
        return out

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        if not isinstance(packed, NativeLinear):
            return super().linear(x, packed)
        if x.dtype == torch.float16:
            return self.linear(x.float(), packed).to(torch.float16)
        check("x", x, (None, packed.k), *FLOATS, strided=True)
        out = torch.empty((x.shape[0], packed.n), dtype=x.dtype)
        layer = packed.struct()
        self.library.call(
            "loom_linear",
            *(layer, x.data_ptr(), TYPES[x.dtype], x.shape[0], x.stride(0), out.data_ptr()),
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype == torch.float16:
            return super().rms_norm(x, weight, eps)
        dim = x.shape[-1]
        check("x", x, (None,) * x.dim(), *FLOATS, strided=True)
        check("weight", weight, (dim,), x.dtype, torch.float32)
        # Rows of one stride as they are; anything else (a slice of heads) is laid out first.
        rows = x if x.dim() == 2 else x.reshape(-1, dim)
        out = torch.empty(x.shape, dtype=x.dtype)
        self.library.call(
            "loom_rms_norm",
            *(rows.data_ptr(), weight.data_ptr(), TYPES[x.dtype], TYPES[weight.dtype]),
            *(rows.shape[0], rows.stride(0), dim, eps, out.data_ptr()),
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype == torch.float16:
            return super().add_rms_norm(x, residual, weight, eps)
        rows, dim = residual.shape
        check("residual", residual, (None, None), *FLOATS)
        check("x", x, (rows, dim), residual.dtype)
        check("weight", weight, (dim,), residual.dtype, torch.float32)
        out = torch.empty_like(residual)
        self.library.call(
            "loom_add_rms_norm",
            *(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), TYPES[x.dtype]),
            *(TYPES[weight.dtype], rows, dim, eps, out.data_ptr()),
        )
        return out

    def rotary(
        self, q: Tensor, k: Tensor, positions: Tensor, rope: Tensor, *, interleaved: bool
    ) -> None:
        if q.dtype == torch.float16:
            super().rotary(q, k, positions, rope, interleaved=interleaved)
            return
        check("rope", rope, (None, None), torch.float32)
        check("positions", positions, (q.shape[0],), torch.int64)
        rotary_dim = rope.shape[1]
        for name, x in (("q", q), ("k", k)):
            check(name, x, (q.shape[0], None, None), *FLOATS, strided=True)
            if rotary_dim % 2 or rotary_dim > x.shape[-1]:
                raise ValueError(
                    f"rope: {rotary_dim} columns, expected an even number up to the head"
                    f" dimension of {name}, {x.shape[-1]}"
                )
            self.library.call(
                "loom_rotary",
                *(x.data_ptr(), TYPES[x.dtype], *x.shape[:2], *x.stride()[:2]),
                *(positions.data_ptr(), rope.data_ptr(), *rope.shape, int(interleaved)),
            )

    def store_kv(
        self, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor,
        scales: KvScales | None = None,
    ) -> None:  # fmt: skip
        if k.dtype == torch.float16:
            super().store_kv(k, v, k_pool, v_pool, slots, scales)
            return
        check("slots", slots, (k.shape[0],), torch.int64)
        pools = pools_struct(k_pool, v_pool, scales)
        for name, x, pool, of_codes in (
            ("k", k, k_pool, pools.k_scales),
            ("v", v, v_pool, pools.v_scales),
        ):
            check(name, x, tuple(k.shape), *FLOATS, strided=True)
            check(f"{name}_pool", pool, (None, *k.shape[1:]), *POOLS)
            self.library.call(
                "loom_store_kv",
                *(x.data_ptr(), TYPES[x.dtype], x.shape[0], *x.stride()[:2], *x.shape[1:]),
                *(pool.data_ptr(), of_codes, TYPES[pool.dtype], pool.shape[0], slots.data_ptr()),
            )

    def extend_attention(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: AttentionBatch, spec: AttentionSpec,
        scales: KvScales | None = None,
    ) -> Tensor:  # fmt: skip
        if q.dtype == torch.float16 or not head_dim_fits(q.shape[-1]):
            return super().extend_attention(q, k_pool, v_pool, batch, spec, scales)
        check("q", q, (None, None, None), *FLOATS, strided=True)
        tokens, heads, dim = q.shape
        check("k_pool", k_pool, (None, None, dim), *POOLS)
        check("v_pool", v_pool, tuple(k_pool.shape), k_pool.dtype)
        slots, kv_heads = k_pool.shape[:2]
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"heads {heads}: expected a multiple of the KV heads, {kv_heads}")
        out = torch.empty((tokens, heads, dim), dtype=q.dtype)
        sinks = None if spec.sinks is None else spec.sinks.float().contiguous()
        self.library.call(
            "loom_attention",
            *(q.data_ptr(), TYPES[q.dtype], *q.stride()[:2], heads, kv_heads, dim),
            *(pools_struct(k_pool, v_pool, scales), TYPES[k_pool.dtype], slots),
            *(batch_struct(batch, tokens), attention_struct(spec, sinks, heads), out.data_ptr()),
        )
        return out

    decode_attention = extend_attention

    def causal_conv(
        self, x: Tensor, weight: Tensor, states: Tensor, batch: RecurrentBatch
    ) -> Tensor:
        return native_recurrent.causal_conv(self.library, x, weight, states, batch)

    def gated_delta(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        rate: Tensor,
        states: Tensor,
        batch: RecurrentBatch,
    ) -> Tensor:
        return native_recurrent.gated_delta(self.library, q, k, v, decay, rate, states, batch)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return self._act_and_mul(x, "silu")

    def gelu_and_mul(self, x: Tensor, *, tanh: bool) -> Tensor:
        return self._act_and_mul(x, "gelu_tanh" if tanh else "gelu")

    def _act_and_mul(self, x: Tensor, activation: str) -> Tensor:
        if x.dtype == torch.float16:
            if activation == "silu":
                return super().silu_and_mul(x)
            return super().gelu_and_mul(x, tanh=activation == "gelu_tanh")
        check("x", x, (None, None), *FLOATS)
        rows, width = x.shape
        if width % 2:
            raise ValueError(f"x: {width} columns, expected gate and up of the same width")
        out = torch.empty((rows, width // 2), dtype=x.dtype)
        self.library.call(
            "loom_act_and_mul",
            *(x.data_ptr(), TYPES[x.dtype], rows, width // 2),
            *(ACTIVATIONS[activation], out.data_ptr()),
        )
        return out

    def pack_experts(self, experts: Iterable[Expert], *, quantization: str | None = None) -> Any:
        pairs = super().pack_experts(experts, quantization=quantization)
        return NativeExperts(pairs) if native_experts.fits(pairs) else pairs

    def run_experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, packed: Any, activation: str
    ) -> Tensor:
        if not isinstance(packed, NativeExperts):
            return super().run_experts(x, ids, weights, packed, activation)
        if x.dtype == torch.float16:
            return super().run_experts(x, ids, weights, packed.pairs, activation)
        ids, weights = ids.contiguous(), weights.contiguous()
        return native_experts.run(self.library, x, ids, weights, packed, activation)

    def sample(self, logits: Tensor, s: SamplingTensors) -> Tensor:
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        struct = sampling_struct(logits.float(), s, out)
        self.library.call("loom_sample", struct)
        return out

    def compile(self, model: DecoderModel) -> CompiledDecoder | None:
        return NativeDecoder(self.library, model) if fits(model) else None


def _checked_bias(bias: Tensor, n: int) -> Tensor:
    check("bias", bias, (n,), *FLOATS, torch.float16)
    return bias.float()
