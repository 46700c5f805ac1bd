"""Mixtures of experts: two products in which each tile of tokens meets its own expert's weights.

Decisions:

- A (token, choice) pair is a row. Rows are sorted by expert on the device, so that an expert's
  weights are read once for each tile of its rows and not at all where it has none. The first
  product gathers its rows from the tokens, the second scatters them back; nothing else is moved.
- Tiles are numbered without looking at the data, as those of `extend_attention` are: expert e may
  use the tile numbers from starts[e] // BLOCK_M + e on. The grid follows from shapes alone, so that
  a step neither waits nor differs from the one that a graph captured.
- There is one tile for each type, however many tokens there are, and the products of one output are
  summed in the order of K. A token's choices are added in their own order. So its result does not
  depend on the other tokens. A decode step fills few rows of its tiles: it waits for the weights'
  bytes, four times as long as for the products that are wasted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.blocks.dense_mlp import act_and_mul
from ops.coded_weight import GROUP_KINDS
from ops.gpu.coded_linear import CodedLinear, coded_product, coded_tile, pack, piece_of, stacked
from ops.gpu.library import Chip, Tile, chip_of, register
from ops.op_set import Expert, GroupedWeight

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ops.op_set import OpSet

_COMBINED = 1024  # features of a program that adds choices up


@triton.jit
def _expert_of_tile(starts, num_experts, tile, BLOCK_M: tl.constexpr):
    """The last expert e whose first tile number, starts[e] // BLOCK_M + e, is <= tile."""
    low = 0
    high = num_experts - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(starts + middle) // BLOCK_M + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _grouped_linear_kernel(
    x, weight, scales, table, bias, out, order, starts, num_experts, n, k, x_stride, top_k, groups,
    SCATTER: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, KIND: tl.constexpr,
    BITS: tl.constexpr, HAS_ZEROS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of one tile of an expert's rows. Grid (T * k // BLOCK_M + E, cdiv(N,
    BLOCK_N)). With BITS the weight is a `CodedLinear`'s, and BLOCK_K its pieces."""
    tile = tl.program_id(0)
    expert = _expert_of_tile(starts, num_experts, tile, BLOCK_M)
    begin = tl.load(starts + expert)
    end = tl.load(starts + expert + 1)
    first = begin + (tile - begin // BLOCK_M - expert) * BLOCK_M
    if first >= end:
        return
    place = first + tl.arange(0, BLOCK_M)
    live = place < end
    pair = tl.load(order + place, mask=live, other=0)
    source = place.to(tl.int64) if SCATTER else pair // top_k
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    of_expert = expert.to(tl.int64) * n
    x_at = x + source * x_stride  # [BLOCK_M]
    columns = (column < n)[:, None]
    if BITS:
        row_bytes, at = k * BITS // 8, expert.to(tl.int64) * groups * n
        if KIND == "nf4":
            table += expert * 16
        acc = tl.trans(
            coded_product(
                x_at, live, weight + of_expert * row_bytes, scales + at, table, column, n, 0, k,
                row_bytes, n,
                KIND, BITS, GROUP, BLOCK_K, HAS_ZEROS, BLOCK_M, BLOCK_N,
            )
        )  # fmt: skip
    else:
        inner = tl.arange(0, BLOCK_K)
        x_at = x_at[:, None] + inner[None, :]  # [BLOCK_M, BLOCK_K]
        w_at = weight + ((of_expert + column) * k)[:, None] + inner[None, :]  # [BLOCK_N, BLOCK_K]
        rows = live[:, None]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, k, BLOCK_K):
            if EVEN_K:
                a = tl.load(x_at + start, mask=rows, other=0.0)
                b = tl.load(w_at + start, mask=columns, other=0.0)
            else:
                there = (start + inner < k)[None, :]
                a = tl.load(x_at + start, mask=rows & there, other=0.0)
                b = tl.load(w_at + start, mask=columns & there, other=0.0)
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    if HAS_BIAS:
        added = tl.load(bias + of_expert + column, mask=column < n, other=0.0)
        acc += added.to(tl.float32)[None, :]
    target = pair if SCATTER else place.to(tl.int64)
    tl.store(
        out + (target * n)[:, None] + column[None, :],
        acc.to(out.dtype.element_ty),
        mask=live[:, None] & (column < n)[None, :],
    )


@triton.jit
def _combine_kernel(each, weights, out, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK features of one token: the weighted sum of its choices. Grid (T, cdiv(H, BLOCK))."""
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = feature < size
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        row = token * TOP_K + choice
        value = tl.load(each + row * size + feature, mask=live, other=0.0).to(tl.float32)
        total += tl.load(weights + row) * value
    tl.store(out + token * size + feature, total.to(out.dtype.element_ty), mask=live)


def experts_tile(itemsize: int, chip: Chip) -> tuple[Tile, int]:
    """The compiled shape, outputs as block_n, and BLOCK_K."""
    if itemsize == 4:
        return Tile(16, 32, 4, 1), 32
    return Tile(64, 128, 4, 2 if chip.amd else 3), 64


def _grouped_linear(
    x: Tensor, weight: Tensor, scales: Tensor | None, table: Tensor | None, bias: Tensor | None,
    order: Tensor, starts: Tensor, kind: str, zeros: bool, top_k: int, scatter: bool,
) -> Tensor:  # fmt: skip
    """kind: "" where the weight has x's type, and no scales."""
    (experts, n), k = weight.shape[:2], x.shape[1]
    pairs = order.shape[0]
    out = torch.empty((pairs, n), dtype=x.dtype, device=x.device)
    if not pairs:
        return out
    tile, block_k = experts_tile(x.element_size(), chip_of(x))
    groups = 1 if scales is None else scales.shape[1]
    if kind:
        tile, block_k = coded_tile(False, x.element_size(), chip_of(x)), piece_of(k // groups)
    grid = (pairs // tile.block_m + experts, triton.cdiv(n, tile.block_n))
    _grouped_linear_kernel[grid](
        x, weight, scales, table, bias, out, order, starts, experts, n, k, x.stride(0), top_k,
        groups, SCATTER=scatter, HAS_BIAS=bias is not None, EVEN_K=k % block_k == 0,
        KIND=kind, BITS=GROUP_KINDS.get(kind, 0), HAS_ZEROS=zeros, GROUP=k // groups,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=block_k,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def _combine(each: Tensor, weights: Tensor) -> Tensor:
    tokens, top_k = weights.shape
    size = each.shape[1]
    out = torch.empty((tokens, size), dtype=each.dtype, device=each.device)
    if tokens:
        _combine_kernel[(tokens, triton.cdiv(size, _COMBINED))](
            each, weights, out, size, TOP_K=top_k, BLOCK=_COMBINED
        )
    return out


_grouped_linear_op = register(
    "grouped_linear(Tensor x, Tensor weight, Tensor? scales, Tensor? table, Tensor? bias, "
    "Tensor order, Tensor starts, str kind, bool zeros, int top_k, bool scatter) -> Tensor",
    _grouped_linear,
    lambda x, weight, scales, table, bias, order, *_: x.new_empty(
        (order.shape[0], weight.shape[1])
    ),
)
_combine_op = register(
    "combine_experts(Tensor each, Tensor weights) -> Tensor",
    _combine,
    lambda each, weights: each.new_empty((weights.shape[0], each.shape[1])),
)


def pack_experts(experts: Iterable[Expert]) -> Expert:
    """Each weight stacked: gate_up [E, 2F, H], down [E, H, F], biases [E, 2F] and [E, H]. Those of
    codes are a `CodedLinear` each, without its bias."""

    def packed(weight: Any) -> Any:
        return pack(weight, None) if isinstance(weight, GroupedWeight) else weight

    def joined(each: tuple[Any, ...]) -> Any:
        if any(isinstance(weight, CodedLinear) for weight in each):
            return stacked(each)
        given = [tensor for tensor in each if tensor is not None]
        return torch.stack(given) if given else None

    parts = (Expert(packed(e.gate_up), packed(e.down), *e[2:]) for e in experts)
    return Expert(*(joined(each) for each in zip(*parts, strict=True)))


def _product(
    x: Tensor, weight: Any, bias: Tensor | None, order: Tensor, starts: Tensor, top_k: int,
    scatter: bool,
) -> Tensor:  # fmt: skip
    scales, table, kind, zeros = None, None, "", False
    if isinstance(weight, CodedLinear):
        scales, table, kind, zeros = weight.scales, weight.table, weight.kind, weight.zeros
        weight = weight.codes
    out: Tensor = _grouped_linear_op(
        x, weight, scales, table, bias, order, starts, kind, zeros, top_k, scatter
    )
    return out


def run_experts(
    x: Tensor, ids: Tensor, weights: Tensor, packed: Expert, activation: str, ops: OpSet
) -> Tensor:
    """See `OpSet.run_experts`; a token's result does not depend on the others.

    Shapes: x [T, H] strided; ids, weights [T, k]; between the products [T * k, 2F] and [T * k, F]
    by expert, then [T * k, H] by token. Grid of a product: (T * k // BLOCK_M + E, cdiv(N,
    BLOCK_N)).
    Numerics: fp32 sums; each of the two products and the activation are rounded to x's type, as
    linear layers are. Reference: ops.reference.ReferenceOps.run_experts.
    """
    gate_up, top_k = packed.gate_up, ids.shape[1]
    count = (gate_up.codes if isinstance(gate_up, CodedLinear) else gate_up).shape[0]
    sorted_ids, order = ids.flatten().sort(stable=True)
    every = torch.arange(count + 1, device=ids.device)
    starts = torch.searchsorted(sorted_ids, every, out_int32=True)
    rows = x, order, top_k
    if isinstance(gate_up, CodedLinear) and gate_up.order is not None:
        # Copies of the tokens, already by expert, each with its features in its expert's order.
        copies = x[order // top_k].gather(1, gate_up.order[sorted_ids])
        rows = copies, torch.arange(len(order), device=ids.device), 1
    inner = _product(rows[0], gate_up, packed.gate_up_bias, rows[1], starts, rows[2], False)
    inner = act_and_mul(inner, activation, ops)
    if isinstance(packed.down, CodedLinear) and packed.down.order is not None:
        inner = inner.gather(1, packed.down.order[sorted_ids])
    each = _product(inner, packed.down, packed.down_bias, order, starts, top_k, True)
    out: Tensor = _combine_op(each, weights.contiguous())
    return out
