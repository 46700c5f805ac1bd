"""Linear layers whose weights are integers of 4 or 8 bits, or floats of as many, in groups:
`ops.coded_weight`.

Decisions:

- The integers less their zero, and the floats, are exact in every type of x, so a product takes
  them as they are, and its float32 sum over a group is multiplied by the group's scale. Nothing is
  rounded that the float model of the same values does not round.
- A float of a table ("nf4") is exact in float32 alone. It is multiplied by its scale there and
  rounded to the type of x, which is the weight that bitsandbytes multiplies by, and the float
  model, too. Fifteen selections find it in registers by the bits of its code.
- Of two codes of 4 bits in a byte, the low one stands `piece` inputs before the high one: both
  halves of a byte are whole tiles, and none is taken apart and put together.
- Weights are the left operand, for a Hopper's tensor cores take that one from registers, where
  integers become floats; x is the right one, of as few as 16 tokens.
- Steps of up to 16 tokens have tiles of their own, for the others would keep the chip busy with
  products of nothing while it could read. Both add in the same order of K, a `chunk` at a time, so
  a token's result does not depend on how many there are: to the bit in the interpreter, and on a
  GPU where its tensor cores add alike in instructions of both widths (`gpu_check.py` compares).
- Where K is in another order than the inputs (act-order), inputs are put into it by a launch of
  their own: one that reads them so would fetch each alone, for every tile of outputs.
- A small matrix has too few tiles to keep a chip reading. Its K is cut at fixed places, summed by a
  program for each piece where tokens are few, else piece by piece, and added up in their order:
  one more launch, and the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.coded_weight import GROUP_KINDS
from ops.gpu.library import Chip, Tile, chip_of, register, step_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ops.op_set import GroupedWeight

_FEW_TOKENS, _FEW_OUTPUTS = 16, 64  # of a tile of few tokens
_PROGRAMS = 256  # enough to keep the largest chips reading
_LEAST_CHUNKS = 8  # of a split
_ADDED = 256  # outputs of a program that adds splits up
_PIECES = (64, 32, 16)  # inputs of a product, the most first; two of them are a chunk


@dataclass(frozen=True, slots=True)
class CodedLinear:
    """A packed layer, or the layers of all experts with E before each shape.

    Args:
        codes: [N, K * bits / 8] int8; those of "int8" less 128.
        scales: [groups, N] int32, the bits of float32. kind: a key of `GROUP_KINDS`.
        zeros: the last 8 bits of scales are the groups' zeros, as codes are; else all zeros are in
            the middle.
        n: outputs, the first of N. table: [16] float32, what codes of "nf4" stand for.
        order: [K] int64, see `GroupedWeight`.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None
    kind: str
    zeros: bool
    n: int
    table: Tensor | None = None
    order: Tensor | None = None


@triton.jit
def _levels(table):
    return (
        tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3),
        tl.load(table + 4), tl.load(table + 5), tl.load(table + 6), tl.load(table + 7),
        tl.load(table + 8), tl.load(table + 9), tl.load(table + 10), tl.load(table + 11),
        tl.load(table + 12), tl.load(table + 13), tl.load(table + 14), tl.load(table + 15),
    )  # fmt: skip


@triton.jit
def _of_four(odd, second, levels, AT: tl.constexpr):
    low = tl.where(odd, levels[AT + 1], levels[AT])
    high = tl.where(odd, levels[AT + 3], levels[AT + 2])
    return tl.where(second, high, low)


@triton.jit
def _level(codes, levels):
    """levels[codes], by the codes' bits."""
    odd, second = (codes & 1) != 0, (codes & 2) != 0
    third, fourth = (codes & 4) != 0, (codes & 8) != 0
    low = tl.where(third, _of_four(odd, second, levels, 4), _of_four(odd, second, levels, 0))
    high = tl.where(third, _of_four(odd, second, levels, 12), _of_four(odd, second, levels, 8))
    return tl.where(fourth, high, low)


@triton.jit
def _values(codes, dtype: tl.constexpr, KIND: tl.constexpr):
    """Codes as floats; integers of 4 bits too large by the same number each in 16-bit types, of
    which they are the last bits: a conversion would take four times as long."""
    if KIND == "mxfp4":
        # As below; the bias is 1.
        bits = codes.to(tl.int16)
        sign = (bits & 8) << 12
        if dtype == tl.bfloat16:
            wide = (sign | ((bits & 7) << 6)).to(dtype, bitcast=True) * 8.507059173023462e37
        else:
            wide = (sign | ((bits & 7) << 9)).to(tl.float16, bitcast=True).to(dtype) * 16384.0
        wide = wide.to(dtype)
    elif KIND == "fp8":
        # Exponent and mantissa stay, under another bias: 15 or 127 instead of 7.
        bits = codes.to(tl.int16)
        sign = bits & -32768
        if dtype == tl.bfloat16:
            wide = (sign | ((bits & 127) << 4)).to(dtype, bitcast=True) * 1.329227995784916e36
        else:
            wide = (sign | ((bits & 127) << 7)).to(tl.float16, bitcast=True).to(dtype) * 256.0
        wide = wide.to(dtype)
    elif KIND == "int4" and dtype == tl.bfloat16:
        wide = (codes.to(tl.int16) | 0x4300).to(dtype, bitcast=True)
    elif KIND == "int4" and dtype == tl.float16:
        wide = (codes.to(tl.int16) | 0x6400).to(dtype, bitcast=True)
    else:
        wide = codes.to(dtype)
    return wide


@triton.jit
def coded_product(
    x_at, live, codes, scales, table, column, n, begin, end, row_bytes, scale_stride,
    KIND: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, PIECE: tl.constexpr,
    HAS_ZEROS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What inputs begin to end - 1 add to outputs `column` of some tokens, [BLOCK_N, BLOCK_M]
    float32. x_at: [BLOCK_M] pointers to the tokens' inputs, of which those `live` are read."""
    inner = tl.arange(0, PIECE)
    there = column < n
    x_at = x_at[None, :] + inner[:, None]  # [PIECE, BLOCK_M]
    codes_at = codes + (column.to(tl.int64) * row_bytes)[:, None] + inner[None, :]
    dtype = x_at.dtype.element_ty
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if KIND == "nf4":
        levels = _levels(table)
    for start in tl.range(begin, end, 2 * PIECE):
        word = tl.load(scales + (start // GROUP) * scale_stride + column, mask=there, other=0)
        if HAS_ZEROS:
            zero = (word & 255).to(tl.int8)
            word = word & -256
        else:
            zero = tl.full(word.shape, 8 if BITS == 4 else 0, tl.int8)
        none = _values(zero, dtype, KIND)[:, None]
        part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if BITS == 4:
            both = tl.load(codes_at + start // 2, mask=there[:, None], other=0)
        for half in tl.static_range(2):
            if BITS == 4:
                code = (both >> 4) & 15 if half else both & 15
            else:
                code = tl.load(codes_at + start + half * PIECE, mask=there[:, None], other=0)
            if KIND == "nf4":
                scale = word.to(tl.float32, bitcast=True)[:, None]
                wide = (_level(code, levels) * scale).to(dtype)
            else:
                wide = _values(code, dtype, KIND)
            if HAS_ZEROS or KIND == "int4":
                wide -= none
            a = tl.load(x_at + start + half * PIECE, mask=live[None, :], other=0.0)
            part = tl.dot(wide, a, part, input_precision="ieee")
        if KIND == "nf4":
            acc += part
        else:
            acc += part * word.to(tl.float32, bitcast=True)[:, None]
    return acc


@step_kernel("num_tokens")
def _coded_linear_kernel(
    x, codes, scales, table, bias, out, num_tokens, n, k, x_stride, row_bytes, scale_stride,
    SPLIT: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    PIECE: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, APART: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of BLOCK_M tokens. Grid (cdiv(T, BLOCK_M), cdiv(N, BLOCK_N)), where splits
    are APART (.., .., cdiv(K, SPLIT)): each program writes the sum of its own, float32 [splits, T,
    N]."""
    token = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = token < num_tokens
    first = tl.program_id(2) * SPLIT
    row = token
    if APART:
        row += tl.program_id(2).to(tl.int64) * num_tokens
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for begin in tl.range(first, tl.minimum(first + SPLIT, k) if APART else k, SPLIT):
        acc += coded_product(
            x + token * x_stride, live, codes, scales, table, column, n, begin,
            tl.minimum(begin + SPLIT, k), row_bytes, scale_stride,
            KIND, BITS, GROUP, PIECE, HAS_ZEROS, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + (row * n)[None, :] + column[:, None],
        acc.to(out.dtype.element_ty),
        mask=live[None, :] & (column < n)[:, None],
    )


@step_kernel("num_tokens")
def _add_splits_kernel(
    parts, bias, out, num_tokens, n,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK outputs of one token, in the order of splits. Grid (T, cdiv(N, BLOCK))."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        at = (split * num_tokens + token) * n + column
        acc += tl.load(parts + at, mask=column < n, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)
    tl.store(out + token * n + column, acc.to(out.dtype.element_ty), mask=column < n)


def coded_tile(few: bool, itemsize: int, chip: Chip) -> Tile:
    """The compiled shape for few tokens or for many, outputs as block_n."""
    if itemsize == 4:
        return Tile(_FEW_TOKENS, 32, 4, 2)
    if few:
        return Tile(_FEW_TOKENS, _FEW_OUTPUTS, 4, 2 if chip.amd else 4)
    if chip.amd:
        return Tile(64, 64, 8, 2)
    # Where products have their operands in registers, those of 64 tokens spill.
    return Tile(64 if chip.warpgroups else 32, 128, 8, 3)


def piece_of(group: int) -> int:
    return next(piece for piece in _PIECES if group % (2 * piece) == 0)


def split_of(n: int, k: int, chunk: int) -> int:
    """Inputs that are summed by themselves: whole chunks."""
    splits = max(min(_PROGRAMS // -(-n // _FEW_OUTPUTS), k // (_LEAST_CHUNKS * chunk)), 1)
    return -(-(k // chunk) // splits) * chunk


def _linear(
    x: Tensor, codes: Tensor, scales: Tensor, table: Tensor | None, bias: Tensor | None, kind: str,
    zeros: bool, n: int,
) -> Tensor:  # fmt: skip
    tokens, k = x.shape
    out = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    few, group = tokens <= _FEW_TOKENS, k // scales.shape[0]
    tile, piece = coded_tile(few, x.element_size(), chip_of(x)), piece_of(group)
    split = split_of(n, k, 2 * piece)
    splits = triton.cdiv(k, split)
    apart = few and splits > 1
    target = torch.empty((splits, tokens, n), device=x.device) if apart else out
    grid = (triton.cdiv(tokens, tile.block_m), triton.cdiv(n, tile.block_n), splits if apart else 1)
    _coded_linear_kernel[grid](
        x, codes, scales, table, bias, target, tokens, n, k, x.stride(0), codes.stride(0),
        scales.stride(0), SPLIT=split, KIND=kind, BITS=GROUP_KINDS[kind], GROUP=group, PIECE=piece,
        HAS_ZEROS=zeros, HAS_BIAS=bias is not None and not apart, APART=apart,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if apart:
        _add_splits_kernel[(tokens, triton.cdiv(n, _ADDED))](
            target, bias, out, tokens, n, SPLITS=splits, HAS_BIAS=bias is not None, BLOCK=_ADDED
        )
    return out


_linear_op = register(
    "coded_linear(Tensor x, Tensor codes, Tensor scales, Tensor? table, Tensor? bias, str kind, "
    "bool zeros, int n) -> Tensor",
    _linear,
    lambda x, codes, scales, table, bias, kind, zeros, n: x.new_empty((x.shape[0], n)),
)


def coded_linear(x: Tensor, packed: CodedLinear) -> Tensor:
    """See `OpSet.linear`.

    Shapes: x [T, K], its last dimension contiguous; returns [T, N]. Grid: (cdiv(T, BLOCK_M),
    cdiv(N, BLOCK_N)).
    Numerics: fp32 sums of a chunk of K, scaled and added in order. Reference: `torch.matmul` with
    the weights as floats.
    """
    p = packed
    if p.order is not None:
        x = x.index_select(1, p.order)
    out: Tensor = _linear_op(x, p.codes, p.scales, p.table, p.bias, p.kind, p.zeros, p.n)
    return out


def pack(weight: GroupedWeight, bias: Tensor | None) -> CodedLinear:
    """The layer as the kernels read it."""
    n, k = weight.codes.shape
    piece = piece_of(k // weight.scales.shape[1])
    codes = _as_kept(weight.codes, weight.kind)
    scales = weight.scales.view(torch.int32)
    if GROUP_KINDS[weight.kind] == 4:
        low, high = codes.view(n, -1, 2, piece).unbind(2)
        codes = (low | high << 4).flatten(1)
    if weight.zeros is not None:
        scales = scales | _as_kept(weight.zeros, weight.kind).view(torch.uint8)
    has_zeros = weight.zeros is not None
    scales = scales.t().contiguous()
    return CodedLinear(codes, scales, bias, weight.kind, has_zeros, n, weight.table, weight.order)


def _as_kept(codes: Tensor, kind: str) -> Tensor:
    return (codes ^ 128 if kind == "int8" else codes).view(torch.int8)


def unpacked_rows(ids: Tensor, packed: CodedLinear) -> Tensor:
    """Rows ids [T] of the weight, [T, K] float32."""
    codes, words = packed.codes[ids], packed.scales.t()[ids]
    groups, four_bits = words.shape[1], GROUP_KINDS[packed.kind] == 4
    if four_bits:
        pair = codes.unflatten(1, (-1, piece_of(2 * codes.shape[1] // groups)))
        codes = torch.stack((pair & 15, pair >> 4 & 15), 2).flatten(1)
    zeros = torch.full_like(words, 8 if packed.kind == "int4" else 0)
    if packed.zeros:
        zeros = (words & 255).to(torch.int8)
        words = words & -256
    wide = _floats(codes, packed).unflatten(1, (groups, -1)) - zeros[..., None]
    values: Tensor = wide * words.contiguous().view(torch.float32)[..., None]
    values = values.flatten(1)
    if packed.order is None:
        return values
    return torch.empty_like(values).index_copy_(1, packed.order, values)


def _floats(codes: Tensor, packed: CodedLinear) -> Tensor:
    """What unpacked codes stand for, float32."""
    kind = packed.kind
    if packed.table is not None:
        return packed.table[codes.long()]
    if kind == "fp8":
        return codes.view(torch.float8_e4m3fn).float()
    if kind == "mxfp4":
        exponent, mantissa = codes >> 1 & 3, codes & 1
        sizes = torch.ldexp(mantissa + 2 * exponent.sign(), exponent.clamp(min=1) - 2)
        return torch.where(codes & 8 != 0, -sizes, sizes)
    return codes.float()


def stacked(layers: Sequence[CodedLinear]) -> CodedLinear:
    """The layers of all experts in one. All have zeros, or none has."""
    k = layers[0].codes.shape[1] * 8 // GROUP_KINDS[layers[0].kind]
    as_they_come = torch.arange(k, device=layers[0].codes.device)
    orders = [as_they_come if layer.order is None else layer.order for layer in layers]
    in_order = all(layer.order is None for layer in layers)
    tables = [layer.table for layer in layers if layer.table is not None]
    return replace(
        layers[0],
        codes=torch.stack([layer.codes for layer in layers]),
        scales=torch.stack([layer.scales for layer in layers]),
        table=torch.stack(tables) if tables else None,
        order=None if in_order else torch.stack(orders),
    )
