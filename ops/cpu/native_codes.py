"""Weights of integers, packed as they are (csrc/codes.cpp)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ops.coded_weight import CODE_SHAPES, CODED_ROWS, are_in_one_order
from ops.cpu import structs
from ops.cpu.arguments import NativeLinear
from ops.cpu.library import KINDS, Library

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ops.coded_weight import CodedMatrix, CodedWeight, Codes

# What is unpacked at a time, so that a load needs little beside the packed weights.
_PIECE = 8_000_000


def pack(
    library: Library,
    take: Callable[[int], Tensor],
    weight: CodedWeight,
    bias: Tensor | None,
) -> NativeLinear:
    """The weight in panels of its own kinds.

    Args:
        take: hands out memory by bytes. bias: [n] float32 or None.
    Raises:
        ValueError: parts of different k or order, codes of floats beside others, a part other than
            the last of no whole panels, or numbers of other shapes than the kind has.
    """
    for part in weight.parts:
        whole = part is weight.parts[-1] or part.n % CODED_ROWS == 0
        fits = part.k == weight.k and part.k % CODE_SHAPES[part.kind].whole == 0
        alike = part.of_floats == weight.parts[0].of_floats
        if not (fits and alike and whole and are_in_one_order((part, weight.parts[0]))):
            raise ValueError(f"part of shape {[part.n, part.k]}, of {part.kind}: does not fit")
    parts = tuple(_pack_matrix(library, take, part) for part in weight.parts)
    order = None if weight.order is None else torch.from_numpy(weight.order)
    panels, several = (parts[0].panels, ()) if len(parts) == 1 else (None, parts)
    packed = NativeLinear(panels, bias, weight.n, weight.k, parts[0].kind, several, order)
    packed.check(library)
    return packed


def _pack_matrix(
    library: Library, take: Callable[[int], Tensor], matrix: CodedMatrix
) -> NativeLinear:
    kind, n, k = KINDS[matrix.kind], matrix.n, matrix.k
    panel_bytes = library.packed_bytes(kind, CODED_ROWS, k)
    panels = take(library.packed_bytes(kind, n, k))
    rows = max(_PIECE // k // CODED_ROWS, 1) * CODED_ROWS
    for first, codes in matrix.pieces(rows):
        count = min(rows, n - first)
        struct = _struct(matrix, codes, count)
        at = panels.data_ptr() + first // CODED_ROWS * panel_bytes
        library.call("loom_pack_codes", kind, struct, count, k, at)
    return NativeLinear(panels, None, n, k, matrix.kind)


def _struct(matrix: CodedMatrix, codes: Codes, n: int) -> structs.Codes:
    """Points into the arrays, which must outlive it."""
    shape, k = CODE_SHAPES[matrix.kind], matrix.k
    spans = -(-k // shape.span)
    stretches = k // shape.stretch if shape.has_scales else 0
    minima = stretches if shape.has_minima else k // shape.stretch if shape.has_zeros else 0
    minimum_factors = spans if shape.has_minima else 0
    factor_type = "float32" if shape.of_floats else "float16"
    factors = _address("factors", codes.factors, (n, spans), factor_type)
    table = None
    if matrix.kind == "nf4":
        table = matrix.table if matrix.table is None else matrix.table[None]
    return structs.Codes(
        _address("codes", codes.codes, (n, k), "uint8"),
        _address("scales", codes.scales, (n, stretches), "int8"),
        _address("minima", codes.minima, (n, minima), "int8"),
        None if shape.of_floats else factors,
        _address("minimum_factors", codes.minimum_factors, (n, minimum_factors), "float16"),
        factors if shape.of_floats else None,
        _address("table", table, (1, 16 if matrix.kind == "nf4" else 0), "float32"),
    )


def _address(name: str, array: Any, shape: tuple[int, int], dtype: str) -> int | None:
    """Where an array begins; None where the kind has none, and none is given."""
    if not shape[1] and array is None:
        return None
    if array is None or array.shape != shape or array.dtype != dtype:
        given = None if array is None else f"{array.dtype} {list(array.shape)}"
        raise ValueError(f"{name}: {given}, expected {dtype} {list(shape)}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: strides {array.strides}, expected a contiguous array")
    return int(array.ctypes.data)
