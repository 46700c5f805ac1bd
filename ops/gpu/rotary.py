"""Rotary position embedding (Su et al. 2021), neox and interleaved, partial, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ops.gpu.library import register, step_kernel

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _turn(
    x, num_heads, stride_h, cos, sin,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Turns the pairs of every head at x by cos, sin [1, BLOCK_P]."""
    head = tl.arange(0, BLOCK_H)[:, None]
    pair = tl.arange(0, BLOCK_P)[None, :]
    live = (head < num_heads) & (pair < PAIRS)
    first = x + head * stride_h + (2 * pair if INTERLEAVED else pair)
    second = first + (1 if INTERLEAVED else PAIRS)
    a = tl.load(first, mask=live, other=0.0).to(tl.float32)  # [BLOCK_H, BLOCK_P]
    b = tl.load(second, mask=live, other=0.0).to(tl.float32)
    tl.store(first, (a * cos - b * sin).to(x.dtype.element_ty), mask=live)
    tl.store(second, (b * cos + a * sin).to(x.dtype.element_ty), mask=live)


@step_kernel("positions")
def _rotary_kernel(
    q, k, positions, rope, q_heads, k_heads,
    q_stride_t, q_stride_h, k_stride_t, k_stride_h, rope_stride,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """All heads of one token. Grid (T,)."""
    token = tl.program_id(0).to(tl.int64)
    row = rope + tl.load(positions + token).to(tl.int64) * rope_stride
    pair = tl.arange(0, BLOCK_P)[None, :]
    cos = tl.load(row + pair, mask=pair < PAIRS, other=0.0).to(tl.float32)
    sin = tl.load(row + PAIRS + pair, mask=pair < PAIRS, other=0.0).to(tl.float32)
    _turn(
        q + token * q_stride_t, q_heads, q_stride_h, cos, sin, PAIRS, INTERLEAVED, BLOCK_Q, BLOCK_P
    )
    _turn(
        k + token * k_stride_t, k_heads, k_stride_h, cos, sin, PAIRS, INTERLEAVED, BLOCK_K, BLOCK_P
    )


def _rotary(q: Tensor, k: Tensor, positions: Tensor, rope: Tensor, interleaved: bool) -> None:
    tokens = q.shape[0]
    if not tokens:
        return
    pairs = rope.shape[-1] // 2
    _rotary_kernel[(tokens,)](
        q, k, positions, rope, q.shape[1], k.shape[1],
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), rope.stride(0),
        PAIRS=pairs, INTERLEAVED=interleaved,
        BLOCK_Q=triton.next_power_of_2(q.shape[1]), BLOCK_K=triton.next_power_of_2(k.shape[1]),
        BLOCK_P=triton.next_power_of_2(pairs),
    )  # fmt: skip


_rotary_op = register(
    "rotary(Tensor(a!) q, Tensor(b!) k, Tensor positions, Tensor rope, bool interleaved) -> ()",
    _rotary,
    lambda *_: None,
)


def rotary(q: Tensor, k: Tensor, positions: Tensor, rope: Tensor, *, interleaved: bool) -> None:
    """In place rotation of q [T, HQ, D] and k [T, HK, D] (strided) by rope[positions].

    Shapes: positions [T]; rope [max_positions, R] (cos | sin). The first R dimensions of a head
    turn: pairs (i, i + R / 2), or (2i, 2i + 1) when interleaved. Computed in float32.
    Grid: (T,). Reference: ops.reference.rotary.
    """
    _rotary_op(q, k, positions, rope, interleaved)
