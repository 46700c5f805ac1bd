"""Attention of one new token per row: split-KV in two stages.

The keys of a row are cut at fixed absolute positions, each piece (split) is attended to on its own,
and a second kernel merges a row's pieces in their order. So a row's result depends neither on its
neighbours, nor on the number of programs, nor on the bound of the context that a CUDA graph was
captured with.

Splits grow with the position: eight of 128 keys, eight of 256, eight of 512, ... A short context
thus has enough pieces to fill a GPU at batch 1, and a long one needs few: 41 at 32768 keys, 57 at
131072, which bounds the workspace (256 rows of 32 heads of 128 at 32768 keys: 173 MB; pieces of
128 keys throughout would take 1.08 GB).

The grid is (B, heads, Z) with Z from B and the bound alone; a program takes splits z, z + Z, ...

Scores are computed transposed: keys are the rows of the tile and the heads of the group its
columns. With 64 keys to a tile Hopper's wgmma, which needs 64 rows, applies to a group of 4 heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.gpu.extend_attention import base_2_scores, key_slots, score_factors
from ops.gpu.kv_codes import as_bytes, kind_of, split_scales, widened
from ops.gpu.library import Chip, Tile, chip_of, register, step_kernel

if TYPE_CHECKING:
    from ops.op_set import AttentionBatch, AttentionSpec, KvScales

FIRST_SPLIT = 128  # keys of the first splits
LEVEL_SPLITS = 8  # splits of one size; then the size doubles
_PROGRAMS = 4096  # enough to fill any GPU several times over


def num_splits(kv_len: int) -> int:
    """How many splits hold the keys 0 .. kv_len - 1."""
    count, end, size = 0, 0, FIRST_SPLIT
    while end < kv_len:
        count, end = count + 1, end + size
        if count % LEVEL_SPLITS == 0:
            size *= 2
    return count


@triton.jit
def _split_begin(split):
    """First key of a split: levels of 8 splits, of 128 << level keys each."""
    level = split // 8
    return 1024 * ((1 << level) - 1) + (split % 8) * (128 << level)


@triton.jit
def _split_of(position):
    """The split that holds a key."""
    level = 0
    while 1024 * ((2 << level) - 1) <= position:
        level += 1
    return level * 8 + (position - 1024 * ((1 << level) - 1)) // (128 << level)


@step_kernel("rows", "kv_lens", "max_splits")
def _split_kernel(
    q, k_pool, v_pool, k_scales, v_scales, parts, part_lse, block_table, rows, kv_lens,
    scale, cap, window,
    q_stride_t, q_stride_h, k_stride, k_stride_h, v_stride, v_stride_h, table_stride,
    heads, kv_heads, max_splits,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, CODES: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Splits z, z + Z, ... of up to BLOCK_G heads of one KV head. Grid (B, HK * cdiv(G, BLOCK_G),
    Z). parts [B, HQ, max_splits, D] and part_lse [B, HQ, max_splits] (base 2) are float32."""
    row = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = (GROUP + BLOCK_G - 1) // BLOCK_G
    kv_head = (tl.program_id(1) // blocks).to(tl.int64)
    kv_len = tl.load(kv_lens + row)
    table_row = block_table + tl.load(rows + row).to(tl.int64) * table_stride
    dims = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_N)
    member = tl.program_id(1) % blocks * BLOCK_G + tl.arange(0, BLOCK_G)
    head = kv_head * GROUP + member
    q_tile = tl.load(
        q + row * q_stride_t + (head * q_stride_h)[None, :] + dims[:, None],
        mask=(dims < HEAD_DIM)[:, None] & (member < GROUP)[None, :],
        other=0.0,
    )  # [BLOCK_D, BLOCK_G]
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(kv_len - window, 0)
    for split in tl.range(
        _split_of(first_key) + tl.program_id(2), _split_of(kv_len - 1) + 1, tl.num_programs(2)
    ):
        begin = tl.maximum(_split_begin(split), first_key)
        end = tl.minimum(_split_begin(split + 1), kv_len)
        acc = tl.zeros([BLOCK_D, BLOCK_G], tl.float32)
        maximum = tl.full([BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        # Tiles stand at multiples of BLOCK_N, so every one of them holds a key that is seen, and
        # the maximum is finite from the first tile on.
        for start in tl.range(begin // BLOCK_N * BLOCK_N, end, BLOCK_N):
            key_at = start + columns
            seen = (key_at >= begin) & (key_at < end)
            slots = key_slots(table_row, key_at, seen, PAGE_SIZE)[:, None]
            loaded = seen[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(
                k_pool + slots * k_stride + kv_head * k_stride_h + dims[None, :],
                mask=loaded,
                other=0,
            )  # [BLOCK_N, BLOCK_D]
            if CODES:
                k = widened(k, CODES).to(q_tile.dtype)
            scores = tl.dot(k, q_tile, input_precision="ieee")  # [BLOCK_N, BLOCK_G]
            if CODES:
                scale_at = slots * kv_heads + kv_head
                scores *= tl.load(k_scales + scale_at, mask=seen[:, None], other=0.0)
            scores = base_2_scores(scores, scale, cap, HAS_CAP)
            scores = tl.where(seen[:, None], scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, 0))
            weights = tl.exp2(scores - new_maximum[None, :])
            decay = tl.exp2(maximum - new_maximum)
            total = total * decay + tl.sum(weights, 0)
            v = tl.load(
                v_pool + slots * v_stride + kv_head * v_stride_h + dims[None, :],
                mask=loaded,
                other=0,
            )
            if CODES:
                v_scale = tl.load(v_scales + scale_at, mask=seen[:, None], other=0.0)
                v = (widened(v, CODES) * v_scale).to(q_tile.dtype)
            acc = acc * decay[None, :]
            acc = tl.dot(tl.trans(v), weights.to(v.dtype), acc, input_precision="ieee")
            maximum = new_maximum
        part = (row * heads + head) * max_splits + split  # [BLOCK_G]
        tl.store(
            parts + part[None, :] * HEAD_DIM + dims[:, None],
            acc / total[None, :],
            mask=(dims < HEAD_DIM)[:, None] & (member < GROUP)[None, :],
        )
        tl.store(part_lse + part, maximum + tl.log2(total), mask=member < GROUP)


@step_kernel("kv_lens", "max_splits")
def _merge_kernel(
    parts, part_lse, out, kv_lens, sinks, window, heads, max_splits, out_stride_t, out_stride_h,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Softmax-weighted sum of one head's parts, eight at a time. Grid (B, HQ)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    kv_len = tl.load(kv_lens + row)
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(kv_len - window, 0)
    end = _split_of(kv_len - 1) + 1
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    if HAS_SINKS:
        maximum = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total = maximum * 0.0 + 1.0
    else:
        maximum = tl.full([], float("-inf"), tl.float32)
        total = tl.zeros([], tl.float32)
    for start in tl.range(_split_of(first_key), end, 8):
        split = start + tl.arange(0, 8)
        part = (row * heads + head) * max_splits + split
        lse = tl.load(part_lse + part, mask=split < end, other=float("-inf"))
        values = tl.load(
            parts + part[:, None] * HEAD_DIM + dims[None, :],
            mask=(split < end)[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )  # [8, BLOCK_D]
        new_maximum = tl.maximum(maximum, tl.max(lse, 0))
        weights = tl.exp2(lse - new_maximum)
        decay = tl.exp2(maximum - new_maximum)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(weights[:, None] * values, 0)
        maximum = new_maximum
    tl.store(
        out + row * out_stride_t + head * out_stride_h + dims,
        (acc / total).to(out.dtype.element_ty),
        mask=dims < HEAD_DIM,
    )


def decode_tile(head_dim: int, itemsize: int, *, chip: Chip) -> Tile:
    """The compiled shape for a head dimension; block_m is not used."""
    if itemsize == 4:
        return Tile(0, 32, 8, 1)  # with four warps it spills on sm_90 under Triton 3.6
    if head_dim > 128:
        return Tile(0, 64, 8, 2 if chip.large_shared else 1)
    return Tile(0, 64, 4, 3 if chip.large_shared else 2)


def launch_decode(
    out: Tensor, q: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: Tensor, rows: Tensor,
    kv_lens: Tensor, sinks: Tensor | None, page_size: int, max_kv_len: int, scale: float,
    window: int, soft_cap: float, k_scales: Tensor | None, v_scales: Tensor | None,
) -> None:  # fmt: skip
    """Writes `decode_attention` of q [B, HQ, D] to out [B, HQ, D], both strided."""
    num_rows, heads, head_dim = q.shape
    kv_heads = k_pool.shape[1]
    group = heads // kv_heads
    block_g = min(64, max(16, triton.next_power_of_2(group)))
    head_blocks = kv_heads * triton.cdiv(group, block_g)
    splits = num_splits(max_kv_len)
    stride = min(splits, max(4, _PROGRAMS // (num_rows * head_blocks)))
    parts = torch.empty((num_rows, heads, splits, head_dim), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((num_rows, heads, splits), dtype=torch.float32, device=q.device)
    tile = decode_tile(head_dim, q.element_size(), chip=chip_of(q))
    block_d = triton.next_power_of_2(head_dim)
    _split_kernel[(num_rows, head_blocks, stride)](
        q, as_bytes(k_pool), as_bytes(v_pool), k_scales, v_scales, parts, part_lse,
        block_table, rows, kv_lens, *score_factors(scale, soft_cap), window,
        q.stride(0), q.stride(1), k_pool.stride(0), k_pool.stride(1),
        v_pool.stride(0), v_pool.stride(1), block_table.stride(0), heads, kv_heads, splits,
        GROUP=group, HEAD_DIM=head_dim, BLOCK_D=block_d, PAGE_SIZE=page_size,
        HAS_WINDOW=window > 0, HAS_CAP=soft_cap > 0, CODES=kind_of(k_pool),
        BLOCK_G=block_g, BLOCK_N=tile.block_n,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    _merge_kernel[(num_rows, heads)](
        parts, part_lse, out, kv_lens, sinks, window, heads, splits, out.stride(0), out.stride(1),
        HEAD_DIM=head_dim, BLOCK_D=block_d, HAS_WINDOW=window > 0, HAS_SINKS=sinks is not None,
        num_warps=2,
    )  # fmt: skip


def _decode(q: Tensor, *arguments: Any) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch_decode(out, q, *arguments)
    return out


_decode_op = register(
    "decode_attention(Tensor q, Tensor k_pool, Tensor v_pool, Tensor block_table, Tensor rows, "
    "Tensor kv_lens, Tensor? sinks, int page_size, int max_kv_len, float scale, int window, "
    "float soft_cap, Tensor? k_scales, Tensor? v_scales) -> Tensor",
    _decode,
    lambda q, *_: q.new_empty(q.shape),
)


def decode_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: AttentionBatch, spec: AttentionSpec,
    scales: KvScales | None = None,
) -> Tensor:  # fmt: skip
    """Attention of exactly one new token per row over its keys, itself included.

    Shapes: q [B, HQ, D] strided; k_pool, v_pool [S, HK, D]; the result [B, HQ, D] contiguous.
    Numerics: fp32 scores, sums and parts, probabilities rounded to the pools' type, int64
    addresses; of codes, keys are exact and values rounded to q's type, and so are probabilities.
    Every kv_len is at least 1. Reference: ops.reference.extend_attention.
    Grid: from B, the heads and batch.max_kv_len, so a captured launch serves any contexts up to it.
    """
    out: Tensor = _decode_op(
        q, k_pool, v_pool, batch.block_table, batch.rows, batch.kv_lens, spec.sinks,
        batch.page_size, batch.max_kv_len, spec.scale, spec.window, spec.soft_cap,
        *split_scales(scales),
    )  # fmt: skip
    return out
