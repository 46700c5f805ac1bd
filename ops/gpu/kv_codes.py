"""Keys and values in one byte each (`ops.kv_codes`): what kernels write and read.

Codes become numbers by integer arithmetic, so that fp8 works on chips without it (below sm_89) and
in Triton's interpreter. They are exact in every 16-bit type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ops.gpu.library import step_kernel
from ops.kv_codes import LARGEST

if TYPE_CHECKING:
    from torch import Tensor

    from ops.op_set import KvScales

NO_CODES, INT8, FP8 = 0, 1, 2  # the kernels' CODES
_KINDS = {torch.int8: INT8, torch.float8_e4m3fn: FP8}


def kind_of(pool: Tensor) -> int:
    return _KINDS.get(pool.dtype, NO_CODES)


def as_bytes(pool: Tensor) -> Tensor:
    """The pool as kernels take it: fp8 as plain bytes."""
    return pool.view(torch.uint8) if pool.dtype is torch.float8_e4m3fn else pool


def split_scales(scales: KvScales | None) -> tuple[Tensor | None, Tensor | None]:
    """Scales of keys and of values, as arguments of an op."""
    return (None, None) if scales is None else (scales.k, scales.v)


@triton.jit
def widened(codes, CODES: tl.constexpr):
    """Codes as float32, without their scale."""
    if CODES == 1:
        wide = codes.to(tl.float32)
    else:
        # Moved into a half a code keeps exponent and mantissa, under a bias of 15 instead of 7.
        bits = codes.to(tl.uint16)
        moved = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
        wide = moved.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return wide


@triton.jit
def encoded(x, CODES: tl.constexpr, LARGEST: tl.constexpr):
    """Codes [H, D] and scales [H] for x [H, D] float32; see `ops.kv_codes.encode`."""
    # A product with 0 is NaN where x is not finite, which a maximum would not show.
    scales = tl.div_rn(tl.max(tl.abs(x), 1), LARGEST) + tl.sum(x * 0.0, 1)
    return codes_of(x, scales, CODES, LARGEST), scales


@triton.jit
def codes_of(x, scales, CODES: tl.constexpr, LARGEST: tl.constexpr):
    """Codes [H, D] for x [H, D] float32, which may be a part of the heads, and their scales [H]."""
    divisor = tl.broadcast_to(tl.where(scales > 0, scales, 1.0)[:, None], x.shape)
    scaled = tl.div_rn(x, divisor)
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    if CODES == 1:
        # Floats at 1.5 * 2**23 are whole numbers, so the sum is rounded to the nearest one.
        codes = ((scaled + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        bits = scaled.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
        # Below 2**-6 the codes are multiples of 2**-9, which is the step of floats at 2**14.
        subnormal = (tl.abs(scaled) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        codes = ((bits >> 24) & 0x80) | tl.where(size < 0x3C800000, subnormal, normal)
        codes = codes.to(tl.uint8)
    return codes


@step_kernel("slots")
def _store_codes_kernel(
    k, v, k_pool, v_pool, k_scales, v_scales, slots,
    k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    CODES: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """One token's keys (program 0 of axis 1) or values, with their scales. Grid (T, 2). The pools
    and scales are contiguous."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    head = tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    live = (head < NUM_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    to = slot * NUM_HEADS + head
    if tl.program_id(1) == 0:
        source = k + token * k_stride_t + (head * k_stride_h)[:, None] + dim[None, :]
        pool, scale = k_pool, k_scales
    else:
        source = v + token * v_stride_t + (head * v_stride_h)[:, None] + dim[None, :]
        pool, scale = v_pool, v_scales
    codes, scales = encoded(tl.load(source, mask=live, other=0.0).to(tl.float32), CODES, LARGEST)
    tl.store(pool + to[:, None] * HEAD_DIM + dim[None, :], codes, mask=live)
    tl.store(scale + to, scales, mask=head < NUM_HEADS)


def store_codes(
    k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor,
    k_scales: Tensor, v_scales: Tensor,
) -> None:  # fmt: skip
    """`store_kv` to pools of codes."""
    tokens, heads, head_dim = k.shape
    _store_codes_kernel[(tokens, 2)](
        k, v, as_bytes(k_pool), as_bytes(v_pool), k_scales, v_scales, slots,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        NUM_HEADS=heads, HEAD_DIM=head_dim, BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
        CODES=kind_of(k_pool), LARGEST=LARGEST[k_pool.dtype],
    )  # fmt: skip
