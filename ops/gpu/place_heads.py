"""Turns the qkv layer's output into attention's input in one launch: norms, rotary, storing.

Each of the four on its own costs every layer a launch and a way through memory, for a few kilobytes
of a decode step. Here a program takes one KV head of one token with the query heads of its group:
q is changed where it stands, k and v go to the pools alone, to pools of codes with their scales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ops.gpu.kv_codes import as_bytes, codes_of, encoded, kind_of, split_scales
from ops.gpu.library import register, step_kernel
from ops.kv_codes import LARGEST

if TYPE_CHECKING:
    from torch import Tensor

    from ops.op_set import HeadNorm, KvScales

_WARP_ELEMENTS = 512  # of the query heads of a program


@triton.jit
def _normed(x, weight_at, live, scale, ELEMENT: tl.constexpr):
    """x [H, N] float32 normed by scale [H], rounded as `rms_norm` rounds: to the weight's type
    before the product with it, to the heads' type after it."""
    weight = tl.load(weight_at, mask=live, other=0.0)
    x = (x * scale[:, None]).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    return x.to(ELEMENT).to(tl.float32)


@triton.jit
def _place(
    source, target, scale_at, heads, source_stride, target_stride, weight, eps, cos, sin,
    CODES: tl.constexpr, LARGEST: tl.constexpr,
    HAS_NORM: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Norms and turns `heads` heads from source to target, of CODES as codes with the scale of the
    one head. cos, sin [1, BLOCK_P]; the dimensions behind the pairs take BLOCK_R columns, 0 where
    there are none."""
    head = tl.arange(0, BLOCK_H)[:, None]
    live = head < heads
    source += head * source_stride
    target += head * target_stride
    squares = tl.zeros([BLOCK_H], tl.float32)
    if PAIRS > 0:
        pair = tl.arange(0, BLOCK_P)[None, :]
        paired = pair < PAIRS
        first = 2 * pair if INTERLEAVED else pair
        second = first + (1 if INTERLEAVED else PAIRS)
        a = tl.load(source + first, mask=live & paired, other=0.0).to(tl.float32)
        b = tl.load(source + second, mask=live & paired, other=0.0).to(tl.float32)
        squares += tl.sum(a * a, 1) + tl.sum(b * b, 1)
    if BLOCK_R > 0:
        rest = 2 * PAIRS + tl.arange(0, BLOCK_R)[None, :]
        behind = rest < HEAD_DIM
        c = tl.load(source + rest, mask=live & behind, other=0.0).to(tl.float32)
        squares += tl.sum(c * c, 1)
    if HAS_NORM:
        scale = tl.rsqrt(squares / HEAD_DIM + eps)
        if PAIRS > 0:
            a = _normed(a, weight + first, paired, scale, source.dtype.element_ty)
            b = _normed(b, weight + second, paired, scale, source.dtype.element_ty)
        if BLOCK_R > 0:
            c = _normed(c, weight + rest, behind, scale, source.dtype.element_ty)
    # Rounded to the heads' type first: the pools may have another.
    element = source.dtype.element_ty
    if PAIRS > 0:
        new_a = (a * cos - b * sin).to(element).to(tl.float32)
        new_b = (b * cos + a * sin).to(element).to(tl.float32)
    if BLOCK_R > 0:
        c = c.to(element).to(tl.float32)
    if CODES:
        most = tl.zeros([BLOCK_H], tl.float32)
        not_finite = tl.zeros([BLOCK_H], tl.float32)  # NaN or 0, see `encoded`
        if PAIRS > 0:
            most = tl.maximum(tl.max(tl.abs(new_a), 1), tl.max(tl.abs(new_b), 1))
            not_finite += tl.sum(new_a * 0.0, 1) + tl.sum(new_b * 0.0, 1)
        if BLOCK_R > 0:
            most = tl.maximum(most, tl.max(tl.abs(c), 1))
            not_finite += tl.sum(c * 0.0, 1)
        scales = tl.div_rn(most, LARGEST) + not_finite
        tl.store(scale_at + tl.arange(0, BLOCK_H), scales, mask=tl.arange(0, BLOCK_H) < heads)
        if PAIRS > 0:
            new_a = codes_of(new_a, scales, CODES, LARGEST)
            new_b = codes_of(new_b, scales, CODES, LARGEST)
        if BLOCK_R > 0:
            c = codes_of(c, scales, CODES, LARGEST)
    kept = target.dtype.element_ty
    if PAIRS > 0:
        tl.store(target + first, new_a.to(kept), mask=live & paired)
        tl.store(target + second, new_b.to(kept), mask=live & paired)
    if BLOCK_R > 0:
        tl.store(target + rest, c.to(kept), mask=live & behind)


@step_kernel("positions", "slots")
def _place_heads_kernel(
    q, k, v, k_pool, v_pool, k_scales, v_scales, positions, slots, rope, q_weight, k_weight,
    q_eps, k_eps, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    rope_stride, k_pool_stride, k_pool_stride_h, v_pool_stride, v_pool_stride_h,
    CODES: tl.constexpr, LARGEST: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One KV head of one token, and the query heads of its group. Grid (T, HK)."""
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    cos = 1.0
    sin = 0.0
    if PAIRS > 0:
        row = rope + tl.load(positions + token).to(tl.int64) * rope_stride
        pair = tl.arange(0, BLOCK_P)[None, :]
        cos = tl.load(row + pair, mask=pair < PAIRS, other=0.0).to(tl.float32)
        sin = tl.load(row + PAIRS + pair, mask=pair < PAIRS, other=0.0).to(tl.float32)
    q_heads = q + token * q_stride_t + kv_head * GROUP * q_stride_h
    _place(
        q_heads, q_heads, None, GROUP, q_stride_h, q_stride_h, q_weight, q_eps, cos, sin,
        0, LARGEST, HAS_Q_NORM, PAIRS, INTERLEAVED, HEAD_DIM, BLOCK_G, BLOCK_P, BLOCK_R,
    )  # fmt: skip
    slot = tl.load(slots + token)
    stored = (slot >= 0).to(tl.int32)
    scale = slot * tl.num_programs(1) + kv_head  # [S, HK]
    _place(
        k + token * k_stride_t + kv_head * k_stride_h,
        k_pool + slot * k_pool_stride + kv_head * k_pool_stride_h,
        k_scales + scale if CODES else None, stored, 0, 0, k_weight, k_eps, cos, sin,
        CODES, LARGEST, HAS_K_NORM, PAIRS, INTERLEAVED, HEAD_DIM, 1, BLOCK_P, BLOCK_R,
    )  # fmt: skip
    dim = tl.arange(0, BLOCK_D)
    there = dim < HEAD_DIM
    value = tl.load(v + token * v_stride_t + kv_head * v_stride_h + dim, mask=there, other=0.0)
    v_at = v_pool + slot * v_pool_stride + kv_head * v_pool_stride_h + dim
    if CODES:
        head = value.to(tl.float32)[None, :]
        codes, scales = encoded(head, CODES, LARGEST)
        one = tl.arange(0, 1)
        tl.store(v_scales + scale + one, scales, mask=one < stored)
        tl.store(v_at[None, :], codes, mask=(dim < HEAD_DIM * stored)[None, :])
    else:
        tl.store(v_at, value.to(v_pool.dtype.element_ty), mask=dim < HEAD_DIM * stored)


def _place_heads(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, positions: Tensor,
    slots: Tensor, rope: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None,
    q_eps: float, k_eps: float, interleaved: bool,
    k_scales: Tensor | None, v_scales: Tensor | None,
) -> None:  # fmt: skip
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    if not tokens:
        return
    pairs = 0 if rope is None else rope.shape[-1] // 2
    rest = head_dim - 2 * pairs
    block_g = triton.next_power_of_2(heads // kv_heads)
    _place_heads_kernel[(tokens, kv_heads)](
        q, k, v, as_bytes(k_pool), as_bytes(v_pool), k_scales, v_scales, positions, slots, rope,
        q_weight, k_weight, q_eps, k_eps,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        0 if rope is None else rope.stride(0),
        k_pool.stride(0), k_pool.stride(1), v_pool.stride(0), v_pool.stride(1),
        CODES=kind_of(k_pool), LARGEST=LARGEST.get(k_pool.dtype, 1.0),
        GROUP=heads // kv_heads, HEAD_DIM=head_dim, PAIRS=pairs, INTERLEAVED=interleaved,
        HAS_Q_NORM=q_weight is not None, HAS_K_NORM=k_weight is not None,
        BLOCK_G=block_g, BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_P=triton.next_power_of_2(max(1, pairs)),
        BLOCK_R=triton.next_power_of_2(rest) if rest else 0,
        num_warps=min(8, max(1, block_g * head_dim // _WARP_ELEMENTS)),
    )  # fmt: skip


_place_heads_op = register(
    "place_heads(Tensor(a!) q, Tensor k, Tensor v, Tensor(b!) k_pool, Tensor(c!) v_pool, "
    "Tensor positions, Tensor slots, Tensor? rope, Tensor? q_weight, Tensor? k_weight, "
    "float q_eps, float k_eps, bool interleaved, Tensor(d!)? k_scales, "
    "Tensor(e!)? v_scales) -> ()",
    _place_heads,
    lambda *_: None,
)


def place_heads(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, positions: Tensor,
    slots: Tensor, *, q_norm: HeadNorm | None, k_norm: HeadNorm | None,
    rope: Tensor | None, interleaved: bool, scales: KvScales | None = None,
) -> Tensor:  # fmt: skip
    """See `OpSet.place_heads`; q is changed in place and returned, k is left as it is.

    Numerics: as those of `rms_norm` and `rotary`, but for the order of a norm's sum.
    Grid: (T, HK). Reference: ops.reference.place_heads.
    """
    q_weight, q_eps = q_norm or (None, 0.0)
    k_weight, k_eps = k_norm or (None, 0.0)
    _place_heads_op(
        q, k, v, k_pool, v_pool, positions, slots, rope, q_weight, k_weight, q_eps, k_eps,
        interleaved, *split_scales(scales),
    )  # fmt: skip
    return q
