"""Attention of new tokens over cached and new keys, in one kernel for a ragged batch.

Decisions:

- A query tile holds tokens *and* the query heads of one KV head: its row m is token m // G, head
  m % G of the group. A prefill loses nothing by it (as many tiles, each walking as many keys), and
  a row with one new token fills G rows of its tile instead of one.
- Tiles are numbered without looking at the data: batch row b may use the tile numbers from
  qo_indptr[b] * G // BLOCK_M + b on, which are always enough. So the grid follows from T and B
  alone, no index arrays are made, and a program finds its row by bisection. Late tiles come first:
  the last tiles of a prompt see the most keys.
- Keys that every query of the tile sees are walked without masks. Only the diagonal's tiles, or
  all tiles of a sliding window, compare positions; tiles outside the window are not visited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.gpu.kv_codes import as_bytes, kind_of, split_scales, widened
from ops.gpu.library import Chip, Tile, chip_of, register, step_kernel

if TYPE_CHECKING:
    from ops.op_set import AttentionBatch, AttentionSpec, KvScales


LOG2_E = 1.4426950408889634


def score_factors(scale: float, soft_cap: float) -> tuple[float, float]:
    """What `base_2_scores` takes: without a cap scale * log2(e) and nothing, with one the factor
    under its tanh and the one behind it."""
    if soft_cap > 0:
        return 2 * LOG2_E * scale / soft_cap, LOG2_E * soft_cap
    return LOG2_E * scale, 0.0


@triton.jit
def base_2_scores(products, scale, cap, HAS_CAP: tl.constexpr):
    """Scores whose power of 2 is the weight: cap(q.k * scale) * log2(e), all factors in one.
    tanh through exp2 stays in [-1, 1]."""
    scores = products * scale
    if HAS_CAP:
        scores = cap - 2.0 * cap / (tl.exp2(scores) + 1.0)
    return scores


@triton.jit
def key_slots(table_row, positions, in_range, PAGE_SIZE: tl.constexpr):
    """KV slots of absolute positions, int64; positions out of range read page 0."""
    pages = tl.load(table_row + positions // PAGE_SIZE, mask=in_range, other=0)
    return pages.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE


@triton.jit
def _row_of_tile(qo_indptr, num_rows, tile, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The last row b whose first tile number, qo_indptr[b] * G // BLOCK_M + b, is <= tile."""
    low = 0
    high = num_rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(qo_indptr + middle) * GROUP // BLOCK_M + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _attend(
    acc, row_max, row_sum, q, k_head, v_head, k_scale_head, v_scale_head, table_row, begin, end,
    at, first_at, last_at, scale, cap, window, k_stride, v_stride, kv_heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys begin .. end - 1 (Milakov and Gimelshein 2018).

    at [BLOCK_M]: the queries' positions, between first_at and last_at for the live ones. MASKED:
    keys may lie after a query, or outside of its window, or past last_at.
    """
    dims = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N):
        key_at = start + columns
        # A key that no query of the tile sees is not loaded: 0 * NaN would be NaN.
        needed = key_at <= last_at if MASKED else key_at >= 0
        if HAS_WINDOW:
            needed &= key_at > first_at - window
        slots = key_slots(table_row, key_at, needed, PAGE_SIZE)  # [BLOCK_N]
        k_at = k_head + slots[:, None] * k_stride + dims[None, :]  # [BLOCK_N, BLOCK_D]
        v_at = v_head + slots[:, None] * v_stride + dims[None, :]
        if MASKED:
            loaded = needed[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(k_at, mask=loaded, other=0)
        elif HEAD_DIM != BLOCK_D:
            loaded = (dims < HEAD_DIM)[None, :]
            k = tl.load(k_at, mask=loaded, other=0)
        else:
            k = tl.load(k_at)
        if CODES:
            k = widened(k, CODES).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if CODES:
            scale_at = slots * kv_heads
            scores *= tl.load(k_scale_head + scale_at, mask=needed, other=0.0)[None, :]
        scores = base_2_scores(scores, scale, cap, HAS_CAP)
        if MASKED:
            seen = needed[None, :] & (key_at[None, :] <= at[:, None])
            if HAS_WINDOW:
                seen &= key_at[None, :] > at[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A query that has seen no key yet has the maximum -inf, and -inf - -inf is NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(row_max - base)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        v = tl.load(v_at, mask=loaded, other=0) if MASKED or HEAD_DIM != BLOCK_D else tl.load(v_at)
        if CODES:
            v_scale = tl.load(v_scale_head + scale_at, mask=needed, other=0.0)
            v = (widened(v, CODES) * v_scale[:, None]).to(q.dtype)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@step_kernel("rows", "qo_indptr", "kv_lens", "num_rows", "num_tokens")
def _extend_kernel(
    q, k_pool, v_pool, k_scales, v_scales, out, block_table, rows, qo_indptr, kv_lens, sinks,
    num_rows, num_tokens, scale, cap, window,
    q_stride_t, q_stride_h, k_stride, k_stride_h, v_stride, v_stride_h, out_stride_t, out_stride_h,
    table_stride, kv_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, CODES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One query tile of one KV head. Grid (T * G // BLOCK_M + B, HK)."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    row = _row_of_tile(qo_indptr, num_rows, tile, GROUP, BLOCK_M)
    q_begin = tl.load(qo_indptr + row)
    q_len = tl.load(qo_indptr + row + 1) - q_begin
    first_m = (tile - q_begin * GROUP // BLOCK_M - row) * BLOCK_M
    # Before the first row and behind the last stand tokens of others (`mixed_attention`): decode
    # rows, attended to elsewhere, and padding, which gets zeros or what the last token gets.
    end = tl.where(row == num_rows - 1, num_tokens - q_begin, q_len)
    if (first_m < 0) | (first_m >= end * GROUP):
        return
    kv_len = tl.load(kv_lens + row)
    table_row = block_table + tl.load(rows + row).to(tl.int64) * table_stride

    m = first_m + tl.arange(0, BLOCK_M)
    token = m // GROUP
    q_head = kv_head * GROUP + m % GROUP
    dims = tl.arange(0, BLOCK_D)
    live = (token < q_len)[:, None] & (dims < HEAD_DIM)[None, :]
    token_at = (q_begin + token).to(tl.int64)
    if first_m >= q_len * GROUP:
        tl.store(
            out + (token_at * out_stride_t + q_head * out_stride_h)[:, None] + dims[None, :],
            tl.zeros([BLOCK_M, BLOCK_D], out.dtype.element_ty),
            mask=(token < end)[:, None] & (dims < HEAD_DIM)[None, :],
        )
        return
    q_tile = tl.load(
        q + (token_at * q_stride_t + q_head * q_stride_h)[:, None] + dims[None, :],
        mask=live,
        other=0.0,
    )  # [BLOCK_M, BLOCK_D]

    prefix = kv_len - q_len
    # Rows of the tile past the last token stand where it does, so that they too see a key.
    at = prefix + tl.minimum(token, q_len - 1)
    first_at = prefix + first_m // GROUP
    last_at = prefix + tl.minimum((first_m + BLOCK_M - 1) // GROUP, q_len - 1)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if HAS_SINKS:
        # A sink is a logit without a value: it starts the maximum and the sum.
        row_max = tl.load(sinks + q_head).to(tl.float32) * 1.4426950408889634
        row_sum = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)

    k_head = k_pool + kv_head * k_stride_h
    v_head = v_pool + kv_head * v_stride_h
    if CODES:
        k_scales += kv_head
        v_scales += kv_head
    if HAS_WINDOW:
        masked_from = tl.maximum(first_at - window + 1, 0) // BLOCK_N * BLOCK_N
    else:
        masked_from = (first_at + 1) // BLOCK_N * BLOCK_N
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q_tile, k_head, v_head, k_scales, v_scales, table_row, 0,
            masked_from, at, first_at, last_at, scale, cap, window, k_stride, v_stride,
            kv_heads,
            HEAD_DIM, BLOCK_D, PAGE_SIZE, BLOCK_N, False, False, HAS_CAP, CODES,
        )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q_tile, k_head, v_head, k_scales, v_scales, table_row, masked_from,
        last_at + 1, at, first_at, last_at, scale, cap, window, k_stride, v_stride, kv_heads,
        HEAD_DIM, BLOCK_D, PAGE_SIZE, BLOCK_N, True, HAS_WINDOW, HAS_CAP, CODES,
    )  # fmt: skip
    # A query always sees its own key, so no sum is zero.
    acc = acc / row_sum[:, None]
    tl.store(
        out + (token_at * out_stride_t + q_head * out_stride_h)[:, None] + dims[None, :],
        acc.to(out.dtype.element_ty),
        mask=(token < end)[:, None] & (dims < HEAD_DIM)[None, :],
    )


def extend_tile(head_dim: int, itemsize: int, *, short: bool, chip: Chip) -> Tile:
    """The compiled shape for a head dimension. Where operands stand in registers the larger tiles
    would spill (compiled for sm_80, 86, 89 and 120).

    Args:
        itemsize: bytes of an element of q and the pools.
        short: no row has more than 64 (token, head) pairs, as in a step of decode rows.
    """
    wide = head_dim > 128
    if itemsize == 4:  # float32 has no tensor cores: it is for tests and for precision
        return Tile(16 if wide else 32, 32, 8, 1)
    if chip.warpgroups:
        if short:
            # Of 256 dimensions four warps spill in the loop over keys, under Triton 3.6 and 3.7.
            return Tile(64, 32, 8, 2) if wide else Tile(64, 64, 4, 2)
        return Tile(128, 32 if wide else 64, 8, 3)
    if short:
        return Tile(32, 32 if wide else 64, 4, 2)
    if wide:
        return Tile(64, 32, 4, 1) if chip.amd else Tile(64, 32, 8, 2)
    return Tile(128, 64 if head_dim <= 64 else 32, 8, 2)


def launch_extend(
    out: Tensor, q: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: Tensor, rows: Tensor,
    qo_indptr: Tensor, kv_lens: Tensor, sinks: Tensor | None, page_size: int, max_q_len: int,
    scale: float, window: int, soft_cap: float, k_scales: Tensor | None, v_scales: Tensor | None,
) -> None:  # fmt: skip
    """Writes `extend_attention` of the tokens from qo_indptr[0] to qo_indptr[-1] to their places in
    out, and something finite behind them; q and out [T, HQ, D], strided."""
    tokens, heads, head_dim = q.shape
    kv_heads = k_pool.shape[1]
    group = heads // kv_heads
    tile = extend_tile(
        head_dim,
        q.element_size(),
        short=max_q_len * group <= 64,
        chip=chip_of(q),
    )
    num_rows = rows.shape[0]
    grid = (tokens * group // tile.block_m + num_rows, kv_heads)
    _extend_kernel[grid](
        q, as_bytes(k_pool), as_bytes(v_pool), k_scales, v_scales, out, block_table, rows,
        qo_indptr, kv_lens, sinks, num_rows, tokens, *score_factors(scale, soft_cap), window,
        q.stride(0), q.stride(1), k_pool.stride(0), k_pool.stride(1),
        v_pool.stride(0), v_pool.stride(1), out.stride(0), out.stride(1), block_table.stride(0),
        kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim),
        PAGE_SIZE=page_size, HAS_WINDOW=window > 0, HAS_CAP=soft_cap > 0,
        HAS_SINKS=sinks is not None, CODES=kind_of(k_pool),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _extend(q: Tensor, *arguments: Any) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch_extend(out, q, *arguments)
    return out


_extend_op = register(
    "extend_attention(Tensor q, Tensor k_pool, Tensor v_pool, Tensor block_table, Tensor rows, "
    "Tensor qo_indptr, Tensor kv_lens, Tensor? sinks, int page_size, int max_q_len, float scale, "
    "int window, float soft_cap, Tensor? k_scales, Tensor? v_scales) -> Tensor",
    _extend,
    lambda q, *_: q.new_empty(q.shape),
)


def extend_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: AttentionBatch, spec: AttentionSpec,
    scales: KvScales | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of new tokens over cached and new keys, read by page.

    Shapes: q [T, HQ, D] strided; k_pool, v_pool [S, HK, D]; the result [T, HQ, D] contiguous.
    Head dimensions that are no power of two are padded with masks.
    Numerics: fp32 scores and sums, probabilities rounded to the pools' type, int64 addresses; of
    codes, keys are exact and values rounded to q's type, and so are probabilities.
    Grid: (T * G // BLOCK_M + B, HK), from shapes alone. Reference: ops.reference.extend_attention.
    """
    out: Tensor = _extend_op(
        q, k_pool, v_pool, batch.block_table, batch.rows, batch.qo_indptr, batch.kv_lens,
        spec.sinks, batch.page_size, batch.max_q_len, spec.scale, spec.window, spec.soft_cap,
        *split_scales(scales),
    )  # fmt: skip
    return out
