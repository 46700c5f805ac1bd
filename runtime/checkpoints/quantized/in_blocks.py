"""Integers in groups as integers in blocks, which the CPU's kernels have: `ops.coded_weight`.

Blocks have a place for groups made of 32 neighbours whose scales half floats hold: most of what is
published. Others have none: their weights are expanded. MXFP4's numbers are doubled there and its
powers of two halved. FP8 and nf4 keep their float32 scales, of 128 and of 64 neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ops.coded_weight import CODE_SHAPES, GROUP_OF, CodedMatrix, Codes, GroupedMatrix
from runtime.errors import ModelError

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray


# Of a float32 that kernels may take 256 times.
_MOST_SCALE = 2.0**118


def in_blocks(matrix: CodedMatrix | GroupedMatrix | None) -> CodedMatrix | None:
    """The same matrix; None where its numbers have no exact place."""
    if not isinstance(matrix, GroupedMatrix):
        return matrix
    if matrix.kind == "mxfp4":
        return _mxfp4(matrix)
    if matrix.kind in ("fp8", "nf4"):
        return _floats(matrix)
    grouped = matrix
    with np.errstate(over="ignore"):
        factors = grouped.scales.astype(np.float16)
    if grouped.zeros is None or grouped.group % GROUP_OF or (factors != grouped.scales).any():
        return None
    kind, zeros = "int4_zero", grouped.zeros.view(np.int8)
    if grouped.bits == 8:
        zeros = (grouped.zeros ^ np.uint8(128)).view(np.int8)
        kind = "int8_zero" if zeros.any() else "int8"

    def spread(values: NDArray[Any], first: int, last: int) -> NDArray[Any]:
        return values[first:last].repeat(grouped.group // GROUP_OF, 1)

    def piece(first: int, last: int) -> Codes:
        codes = np.ascontiguousarray(grouped.read(first, last), np.uint8)
        minima = None if kind == "int8" else spread(zeros, first, last)
        return Codes(codes, spread(factors, first, last), minima=minima)

    return CodedMatrix(kind, grouped.n, grouped.k, piece, grouped.order)


def _mxfp4(grouped: GroupedMatrix) -> CodedMatrix | None:
    """Where all numbers of a block are 0 its power may be anything."""
    halved = grouped.scales * np.float32(0.5)
    with np.errstate(over="ignore"):
        factors = halved.astype(np.float16)
    lost = factors != halved
    for row in np.flatnonzero(lost.any(1)).tolist():
        blocks = grouped.read(row, row + 1).reshape(-1, grouped.group)
        if (blocks[lost[row]] & 7).any():
            return None
    factors[lost] = 0

    def piece(first: int, last: int) -> Codes:
        codes = np.ascontiguousarray(grouped.read(first, last), np.uint8)
        return Codes(codes, factors[first:last])

    return CodedMatrix("mxfp4", grouped.n, grouped.k, piece)


def _floats(grouped: GroupedMatrix) -> CodedMatrix | None:
    """A scale is repeated where it belongs to more neighbours, or to a whole row."""
    span = CODE_SHAPES[grouped.kind].span
    scales = np.asarray(grouped.scales, np.float32)
    whole_rows = grouped.group == grouped.k
    if grouped.order is not None or grouped.k % GROUP_OF:
        return None
    if not (whole_rows or grouped.group % span == 0) or not (np.abs(scales) < _MOST_SCALE).all():
        return None
    spans = -(-grouped.group // span)

    def piece(first: int, last: int) -> Codes:
        codes = np.ascontiguousarray(grouped.read(first, last), np.uint8)
        if grouped.kind == "fp8" and (codes & 127 == 127).any():
            raise ModelError(
                "an FP8 weight is no number (NaN); --quantization none reads it as it is"
            )
        return Codes(codes, scales[first:last].repeat(spans, 1))

    table = None if grouped.table is None else np.ascontiguousarray(grouped.table, np.float32)
    return CodedMatrix(grouped.kind, grouped.n, grouped.k, piece, table=table)
