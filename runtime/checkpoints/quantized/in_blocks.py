"""Integers in groups as integers in blocks, which the CPU's kernels have: `ops.coded_weight`.

Blocks have a place for symmetric weights of 4 and 8 bits,

    weight[n, k] = scale[n, k / group] * (code[n, k] - 2^(bits - 1))

where groups are made of 32 neighbours and half floats hold the scales; half the kinds that are
published. Zeros beside the middle have none: their weights are expanded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ops.coded_weight import GROUP_OF, CodedMatrix, Codes, GroupedMatrix

if TYPE_CHECKING:
    from numpy.typing import NDArray


def in_blocks(matrix: CodedMatrix | GroupedMatrix | None) -> CodedMatrix | None:
    """The same matrix; None where its numbers have no exact place."""
    if not isinstance(matrix, GroupedMatrix):
        return matrix
    grouped, bits, scales = matrix, matrix.bits, matrix.scales
    if grouped.group % GROUP_OF or (grouped.zeros != 2 ** (bits - 1)).any():
        return None
    with np.errstate(over="ignore"):
        factors, lows = scales.astype(np.float16), (scales * -8).astype(np.float16)
    if (factors != scales).any() or (bits == 4 and (lows != scales * -8).any()):
        return None

    def spread(values: NDArray[np.float16], first: int, last: int) -> NDArray[np.float16]:
        return values[first:last].repeat(grouped.group // GROUP_OF, 1)

    def piece(first: int, last: int) -> Codes:
        codes = np.ascontiguousarray(grouped.read(first, last), np.uint8)
        minimum_factors = spread(lows, first, last) if bits == 4 else None
        return Codes(codes, spread(factors, first, last), minimum_factors=minimum_factors)

    return CodedMatrix("int4" if bits == 4 else "int8", matrix.n, matrix.k, piece)
