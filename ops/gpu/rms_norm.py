"""Root mean square norm (Zhang and Sennrich 2019), alone and after a residual addition."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.gpu.library import register, step_kernel

_TILE = 2048  # elements of a tile: a row of a hidden size, or several heads of a q or k norm


@step_kernel("num_rows")
def _rms_norm_kernel(
    x, residual, weight, out, num_rows, inner, eps,
    x_stride_outer, x_stride_inner, residual_stride, dim,
    HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out = (x / sqrt(mean(x^2) + eps)) * weight for ROWS rows, the quotient rounded to the
    weight's type; with a residual, x is first added to it in place. Row r of x stands at
    (r // inner, r % inner). Grid (cdiv(num_rows, ROWS),)."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    live = (row < num_rows) & (column < dim)
    x_at = x + row // inner * x_stride_outer + row % inner * x_stride_inner + column
    wide = tl.load(x_at, mask=live, other=0.0).to(tl.float32)  # [ROWS, BLOCK_D]
    if HAS_RESIDUAL:
        residual_at = residual + row * residual_stride + column
        wide += tl.load(residual_at, mask=live, other=0.0).to(tl.float32)
        stored = wide.to(residual.dtype.element_ty)
        tl.store(residual_at, stored, mask=live)
        wide = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / dim + eps)
    # float32 holds the product of two bfloat16 values exactly, so it is rounded once.
    normed = (wide * scale[:, None]).to(weight.dtype.element_ty).to(tl.float32)
    weights = tl.load(weight + column, mask=column < dim, other=0.0).to(tl.float32)
    tl.store(out + row * dim + column, (normed * weights).to(out.dtype.element_ty), mask=live)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    dim = x.shape[-1]
    # Two leading dimensions with strides of their own cover q and k inside a fused qkv row.
    outer, inner = (x.shape[0], x.shape[1]) if x.dim() == 3 else (x.numel() // dim, 1)
    strided = x if x.dim() in (2, 3) else x.reshape(-1, dim)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_d = triton.next_power_of_2(dim)
    rows = max(1, _TILE // block_d)
    num_rows = outer * inner
    if num_rows:
        _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
            strided, residual, weight, out, num_rows, inner, eps,
            strided.stride(0), strided.stride(1) if x.dim() == 3 else 0,
            residual.stride(0) if residual is not None else 0, dim,
            HAS_RESIDUAL=residual is not None, ROWS=rows, BLOCK_D=block_d,
            num_warps=min(16, max(4, block_d // 512)),
        )  # fmt: skip
    return out


_rms_norm_op = register(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    lambda x, weight, eps: _launch(x, None, weight, eps),
    lambda x, *_: x.new_empty(x.shape),
)
_add_rms_norm_op = register(
    "add_rms_norm(Tensor x, Tensor(a!) residual, Tensor weight, float eps) -> Tensor",
    _launch,
    lambda x, *_: x.new_empty(x.shape),
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm over the last dimension of x [..., D] (2 or 3 dimensions strided), weight [D].

    Numerics: fp32 sum; the quotient is rounded to weight's type before the product with it.
    Reference: ops.reference.rms_norm.
    """
    out: Tensor = _rms_norm_op(x, weight, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In place residual += x (both [T, D]); returns rms_norm(residual).

    The sum is rounded to the residual's type before it is normed, as two separate ops would.
    Reference: ops.reference.add_rms_norm.
    """
    out: Tensor = _add_rms_norm_op(x, residual, weight, eps)
    return out
