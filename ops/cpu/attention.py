"""Paged attention in plain torch, vectorised: gather the keys by slot, then
`scaled_dot_product_attention` (or its explicit form for soft caps and sinks).

What to gather and what to mask is the same for all layers of a step, so it is planned once per
step and window (`Planner`). Rows with one new token are padded to a common length and run as a
batch; longer rows run in tiles of queries, each over its own stretch of keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.kv_codes import gather

if TYPE_CHECKING:
    from ops.op_set import AttentionBatch, AttentionSpec, KvScales

# Queries of a tile: bounds the mask of a long prompt and skips most of what causality masks.
TILE = 256


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one new token and of similar length.

    Args:
        tokens: [B] int64, index of each row's token in the step.
        slots: [B * L] int64; a row shorter than L repeats its last slot, masked.
        mask: [B, 1, 1, L] in q's type, added to the scores; None when nothing is masked.
    """

    tokens: Tensor
    slots: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class ExtendTile:
    """Consecutive queries lo .. hi - 1 (token indices of the step) of one row.

    Args:
        slots: [L] int64, the keys that at least one of the queries attends to.
        mask: [hi - lo, L] in q's type, added to the scores.
    """

    lo: int
    hi: int
    slots: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    decode: list[DecodeGroup]
    tiles: list[ExtendTile]


class Planner:
    """Remembers the plans of the newest batch, one per window and type."""

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self._plans: dict[tuple[int, torch.dtype], Plan] = {}

    def plan(self, batch: AttentionBatch, window: int, dtype: torch.dtype) -> Plan:
        if batch is not self._batch:
            self._batch = batch
            self._plans = {}
        plan = self._plans.get((window, dtype))
        if plan is None:
            plan = self._plans[window, dtype] = make_plan(batch, window, dtype)
        return plan


def make_plan(batch: AttentionBatch, window: int, dtype: torch.dtype) -> Plan:
    kv_lens: list[int] = batch.kv_lens.tolist()
    indptr: list[int] = batch.qo_indptr.tolist()
    tiles: list[ExtendTile] = []
    single: list[tuple[int, int, int]] = []  # (keys attended, batch row, token)
    for b, kv_len in enumerate(kv_lens):
        lo, hi = indptr[b], indptr[b + 1]
        if hi - lo == 1:
            single.append((min(kv_len, window or kv_len), b, lo))
            continue
        for tile_lo in range(lo, hi, TILE):
            tile_hi = min(tile_lo + TILE, hi)
            tiles.append(_tile(batch, b, tile_lo, tile_hi, kv_len - hi, window, dtype))
    return Plan(_decode_groups(batch, single, dtype), tiles)


def _slots(batch: AttentionBatch, rows: Tensor, positions: Tensor) -> Tensor:
    pages = batch.block_table[rows, positions // batch.page_size].long()
    return pages * batch.page_size + positions % batch.page_size


def _tile(
    batch: AttentionBatch, b: int, lo: int, hi: int, offset: int, window: int, dtype: torch.dtype
) -> ExtendTile:
    """offset: position of a token minus its index in the step."""
    first = max(0, lo + offset - window + 1) if window else 0
    keys = torch.arange(first, hi + offset)
    at = torch.arange(lo + offset, hi + offset)[:, None]
    unseen = keys > at
    if window:
        unseen |= keys <= at - window
    mask = torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, -math.inf)
    return ExtendTile(lo, hi, _slots(batch, batch.rows[b].long(), keys), mask)


def _decode_groups(
    batch: AttentionBatch, single: list[tuple[int, int, int]], dtype: torch.dtype
) -> list[DecodeGroup]:
    """Groups of rows in which no row is shorter than half the longest, so that padding costs
    less than the keys themselves."""
    groups: list[list[tuple[int, int, int]]] = []
    for item in sorted(single, key=lambda item: -item[0]):
        if groups and 2 * item[0] >= groups[-1][0][0]:
            groups[-1].append(item)
        else:
            groups.append([item])
    return [_decode_group(batch, group, dtype) for group in groups]


def _decode_group(
    batch: AttentionBatch, group: list[tuple[int, int, int]], dtype: torch.dtype
) -> DecodeGroup:
    longest = group[0][0]
    counts = torch.tensor([count for count, _, _ in group])
    b = torch.tensor([b for _, b, _ in group])
    end = batch.kv_lens[b].long()
    step = torch.arange(longest)[None]
    # Past a row's end its own last key is gathered again: a page of another row is never read.
    positions = torch.minimum((end - counts)[:, None] + step, end[:, None] - 1)
    slots = _slots(batch, batch.rows[b].long()[:, None], positions).flatten()
    mask = None
    if group[-1][0] < longest:
        unseen = step >= counts[:, None]
        mask = torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, -math.inf)
        mask = mask[:, None, None, :]
    return DecodeGroup(torch.tensor([token for _, _, token in group]), slots, mask)


def run(
    plan: Plan, q: Tensor, k_pool: Tensor, v_pool: Tensor, spec: AttentionSpec,
    scales: KvScales | None = None,
) -> Tensor:  # fmt: skip
    """q [T, HQ, D] strided; pools [S, HK, D]; returns [T, HQ, D]."""
    out = torch.empty(q.shape, dtype=q.dtype)
    heads, dim = q.shape[1:]
    kv_heads = k_pool.shape[1]
    k_scales, v_scales = scales or (None, None)
    grouped = (kv_heads, heads // kv_heads, dim)
    for g in plan.decode:
        rows = g.tokens.shape[0]
        shape = (rows, -1, kv_heads, dim)
        keys = gather(k_pool, k_scales, g.slots).view(shape).transpose(1, 2).to(q.dtype)
        values = gather(v_pool, v_scales, g.slots).view(shape).transpose(1, 2).to(q.dtype)
        # The heads that share a KV head are its queries: [B, HK, HQ / HK, D] over [B, HK, L, D].
        queries = q[g.tokens].view(rows, *grouped)
        sinks = None if spec.sinks is None else spec.sinks.view(1, *grouped[:2], 1)
        got = _attend(queries, keys, values, g.mask, spec, sinks)
        out[g.tokens] = got.reshape(rows, heads, dim)
    for t in plan.tiles:
        # KV heads are the batch: [HK, HQ / HK, n, D] over [HK, 1 -> HQ / HK, L, D], no copy.
        keys = gather(k_pool, k_scales, t.slots).permute(1, 0, 2)[:, None].to(q.dtype)
        values = gather(v_pool, v_scales, t.slots).permute(1, 0, 2)[:, None].to(q.dtype)
        size = (*grouped[:2], -1, -1)
        queries = q[t.lo : t.hi].reshape(-1, *grouped).permute(1, 2, 0, 3)
        sinks = None if spec.sinks is None else spec.sinks.view(*grouped[:2], 1, 1)
        got = _attend(queries, keys.expand(size), values.expand(size), t.mask, spec, sinks)
        out[t.lo : t.hi] = got.permute(2, 0, 1, 3).reshape(-1, heads, dim)
    return out


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    spec: AttentionSpec,
    sinks: Tensor | None,
) -> Tensor:
    """q [A, B, n, D], k and v [A, B, L, D]; mask and sinks broadcast to the scores."""
    if not spec.soft_cap and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale)
    scores = q.float() @ k.float().transpose(-1, -2) * spec.scale
    if spec.soft_cap:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        sink = sinks.float().expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v.float()).to(q.dtype)
