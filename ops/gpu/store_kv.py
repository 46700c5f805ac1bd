"""Scatter of a step's new K and V into the paged pools."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ops.gpu.kv_codes import split_scales, store_codes
from ops.gpu.library import register, step_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from ops.op_set import KvScales


@step_kernel("slots")
def _store_kv_kernel(
    k, v, k_pool, v_pool, slots,
    k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    k_pool_stride, k_pool_stride_h, v_pool_stride, v_pool_stride_h,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: HK * D elements of K and of V. Grid (T,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    # -1 would be the last slot in Python's indexing; here it means "store nothing".
    if slot < 0:
        return
    element = tl.arange(0, BLOCK)
    head = element // HEAD_DIM
    dim = element % HEAD_DIM
    live = element < NUM_HEADS * HEAD_DIM
    k_token = tl.load(k + token * k_stride_t + head * k_stride_h + dim, mask=live)
    v_token = tl.load(v + token * v_stride_t + head * v_stride_h + dim, mask=live)
    tl.store(
        k_pool + slot * k_pool_stride + head * k_pool_stride_h + dim,
        k_token.to(k_pool.dtype.element_ty),
        mask=live,
    )
    tl.store(
        v_pool + slot * v_pool_stride + head * v_pool_stride_h + dim,
        v_token.to(v_pool.dtype.element_ty),
        mask=live,
    )


def _store_kv(
    k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor,
    k_scales: Tensor | None, v_scales: Tensor | None,
) -> None:  # fmt: skip
    tokens, heads, head_dim = k.shape
    if not tokens:
        return
    if k_scales is not None and v_scales is not None:
        store_codes(k, v, k_pool, v_pool, slots, k_scales, v_scales)
        return
    _store_kv_kernel[(tokens,)](
        k, v, k_pool, v_pool, slots,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        k_pool.stride(0), k_pool.stride(1), v_pool.stride(0), v_pool.stride(1),
        NUM_HEADS=heads, HEAD_DIM=head_dim, BLOCK=triton.next_power_of_2(heads * head_dim),
    )  # fmt: skip


_store_kv_op = register(
    "store_kv(Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor slots, "
    "Tensor(c!)? k_scales, Tensor(d!)? v_scales) -> ()",
    _store_kv,
    lambda *_: None,
)


def store_kv(
    k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor,
    scales: KvScales | None = None,
) -> None:  # fmt: skip
    """Writes k, v [T, HK, D] (strided) to the pools [S, HK, D] at slots [T] int64; with `scales`
    as codes, to contiguous pools.

    A negative slot is skipped. Two tokens with one slot (padding on the reserved page) leave either
    of their values there. Grid: (T,), of codes (T, 2). Reference: ops.reference.store_kv.
    """
    _store_kv_op(k, v, k_pool, v_pool, slots, *split_scales(scales))
