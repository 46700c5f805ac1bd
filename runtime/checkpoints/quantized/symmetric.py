"""Symmetric weights of 4 and 8 bits as they are: `ops.coded_weight` has a place for

    weight[n, k] = scale[n, k / group] * (code[n, k] - 2^(bits - 1))

where groups are made of 32 neighbours and half floats hold the scales; half the kinds that are
published. Zeros beside the middle, and inputs in another order, have none: their weights are
expanded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ops.coded_weight import CodedMatrix, Codes

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from runtime.checkpoints.quantized.stored import Floats

_GROUP = 32


def symmetric(
    bits: int,
    shape: tuple[int, int],
    scales: Floats,
    read: Callable[[int, int], NDArray[np.uint8]],
) -> CodedMatrix | None:
    """The matrix [n, k]; None where its numbers have no exact place.

    Args:
        bits: 4 or 8. scales: [n or 1, groups].
        read: the unsigned codes of rows first to last - 1.
    """
    (n, k), groups = shape, scales.shape[1]
    if k % (groups * _GROUP):
        return None
    with np.errstate(over="ignore"):
        factors, lows = scales.astype(np.float16), (scales * -8).astype(np.float16)
    if (factors != scales).any() or (bits == 4 and (lows != scales * -8).any()):
        return None

    def spread(values: NDArray[np.float16], first: int, last: int) -> NDArray[np.float16]:
        rows = np.broadcast_to(values, (n, groups))[first:last]
        return rows.repeat(k // groups // _GROUP, 1)

    def piece(first: int, last: int) -> Codes:
        codes = np.ascontiguousarray(read(first, last), np.uint8)
        minimum_factors = spread(lows, first, last) if bits == 4 else None
        return Codes(codes, spread(factors, first, last), minimum_factors=minimum_factors)

    return CodedMatrix("int4" if bits == 4 else "int8", n, k, piece)
