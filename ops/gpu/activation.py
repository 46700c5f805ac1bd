"""Gated activations: act(x[:, :F]) * x[:, F:] with silu, gelu and its tanh form."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.gpu.library import register

_BLOCK = 1024


@triton.jit
def _act_and_mul_kernel(x, out, features, x_stride, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK features of one token, in float32. Grid (T, cdiv(F, BLOCK))."""
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = feature < features
    row = x + token * x_stride
    gate = tl.load(row + feature, mask=live, other=0.0).to(tl.float32)
    up = tl.load(row + features + feature, mask=live, other=0.0).to(tl.float32)
    if KIND == "silu":
        active = gate / (1.0 + tl.exp(-gate))
    elif KIND == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # (1 + tanh(y)) / 2 = 1 / (1 + exp(-2y)).
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate / (1.0 + tl.exp(-2.0 * inner))
    tl.store(out + token * features + feature, (active * up).to(out.dtype.element_ty), mask=live)


def _act_and_mul(x: Tensor, kind: str) -> Tensor:
    tokens, features = x.shape[0], x.shape[1] // 2
    out = torch.empty((tokens, features), dtype=x.dtype, device=x.device)
    if tokens:
        _act_and_mul_kernel[(tokens, triton.cdiv(features, _BLOCK))](
            x, out, features, x.stride(0), KIND=kind, BLOCK=_BLOCK
        )
    return out


_act_and_mul_op = register(
    "act_and_mul(Tensor x, str kind) -> Tensor",
    _act_and_mul,
    lambda x, _: x.new_empty((x.shape[0], x.shape[1] // 2)),
)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(x[:, :F]) * x[:, F:] -> [T, F] for x [T, 2F]. Reference: ops.reference.silu_and_mul."""
    out: Tensor = _act_and_mul_op(x, "silu")
    return out


def gelu_and_mul(x: Tensor, *, tanh: bool) -> Tensor:
    """gelu(x[:, :F]) * x[:, F:] -> [T, F], tanh form or exact. Reference: ops.reference."""
    out: Tensor = _act_and_mul_op(x, "gelu_tanh" if tanh else "gelu")
    return out
