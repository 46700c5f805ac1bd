"""The blocks of GGUF's quantized types as numbers: `ops.coded_weight.Codes`.

A block is 32 or 256 neighbours of a row. How its bits lie is told by ggml's `ggml-common.h` and
`ggml-quants.c` (https://github.com/ggml-org/ggml); tests compare with the `gguf` package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGMLQuantizationType as Type

from ops.coded_weight import Codes

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

_LOW_HIGH = (0, 4)  # where the two parts of a byte begin
_QUARTERS = (0, 2, 4, 6)
_BITS = tuple(range(8))


def _parts(packed: Bytes, shifts: tuple[int, ...], group: int, mask: int) -> Bytes:
    """[..., bytes * parts]: of each `group` bytes the lowest parts of all, then the next ones."""
    grouped = packed.reshape(*packed.shape[:-1], -1, 1, group)
    parts: Bytes = (grouped >> np.array(shifts, np.uint8)[:, None]) & np.uint8(mask)
    return parts.reshape(*packed.shape[:-1], -1)


def _halves(packed: Bytes) -> NDArray[np.float16]:
    return np.ascontiguousarray(packed).view(np.float16)


def _q8_0(blocks: Bytes) -> Codes:
    return Codes(blocks[..., 2:] ^ np.uint8(128), _halves(blocks[..., :2]))


def _mxfp4(blocks: Bytes) -> Codes:
    """Powers of two: half of one is a factor. Where all numbers are 0 it may be anything."""
    codes = _parts(blocks[..., 1:], _LOW_HIGH, 16, 15)
    powers = blocks[..., :1].astype(np.int32) - 128
    powers = np.where((codes & 7 == 0).all(-1, keepdims=True), 0, powers)
    with np.errstate(over="ignore"):
        return Codes(codes, np.ldexp(np.float32(1), powers).astype(np.float16))


def _q4_0(blocks: Bytes) -> Codes:
    """d (q - 8) as d q + -8 d, whose half is exact."""
    factors = _halves(blocks[..., :2])
    codes = _parts(blocks[..., 2:], _LOW_HIGH, 16, 15)
    return Codes(codes, factors, minimum_factors=factors * np.float16(-8))


def _q4_1(blocks: Bytes) -> Codes:
    codes = _parts(blocks[..., 4:], _LOW_HIGH, 16, 15)
    return Codes(codes, _halves(blocks[..., :2]), minimum_factors=_halves(blocks[..., 2:4]))


def _fifth_bits(packed: Bytes) -> Bytes:
    """[..., 32] of 4 bytes: bit i belongs to value i."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: Bytes) -> Codes:
    """d (q - 16), as `_q4_0`."""
    factors = _halves(blocks[..., :2])
    codes = _parts(blocks[..., 6:], _LOW_HIGH, 16, 15) | _fifth_bits(blocks[..., 2:6])
    return Codes(codes, factors, minimum_factors=factors * np.float16(-16))


def _q5_1(blocks: Bytes) -> Codes:
    codes = _parts(blocks[..., 8:], _LOW_HIGH, 16, 15) | _fifth_bits(blocks[..., 4:8])
    return Codes(codes, _halves(blocks[..., :2]), minimum_factors=_halves(blocks[..., 2:4]))


def _iq4_nl(blocks: Bytes) -> Codes:
    return Codes(_parts(blocks[..., 2:], _LOW_HIGH, 16, 15), _halves(blocks[..., :2]))


def _iq4_xs(blocks: Bytes) -> Codes:
    high = np.ascontiguousarray(blocks[..., 2:4]).view(np.uint16)
    high = (high >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & np.uint8(3)
    low = _parts(blocks[..., 4:8], _LOW_HIGH, 1, 15)
    codes = _parts(blocks[..., 8:], _LOW_HIGH, 16, 15)
    scales = (low | high << np.uint8(4)).astype(np.int8) - np.int8(32)
    return Codes(codes, _halves(blocks[..., :2]), scales)


def _q2_k(blocks: Bytes) -> Codes:
    scales, codes = blocks[..., :16], _parts(blocks[..., 16:80], _QUARTERS, 32, 3)
    return Codes(
        codes,
        _halves(blocks[..., 80:82]),
        (scales & np.uint8(15)).view(np.int8),
        -_halves(blocks[..., 82:84]),
        (scales >> np.uint8(4)).view(np.int8),
    )


def _q3_k(blocks: Bytes) -> Codes:
    """A code's third bit stands apart; scales of 6 bits are less by 32."""
    high = _parts(blocks[..., :32], _BITS, 32, 1)
    codes = _parts(blocks[..., 32:96], _QUARTERS, 32, 3) | high << np.uint8(2)
    low_scales = _parts(blocks[..., 96:104], _LOW_HIGH, 8, 15)
    high_scales = _parts(blocks[..., 104:108], _QUARTERS, 4, 3)
    scales = (low_scales | high_scales << np.uint8(4)).astype(np.int8) - np.int8(32)
    return Codes(codes, _halves(blocks[..., 108:110]), scales)


def _six_bits(packed: Bytes) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """Scales and minima [..., 8] of 12 bytes: four bytes of each with 6 bits, whose upper two bits
    belong to the last four, and four bytes with the lower bits of these."""
    first, second, lows = (packed[..., i : i + 4] for i in (0, 4, 8))
    high = np.uint8(0x30)
    scales = np.concatenate((first & 63, lows & 15 | first >> 2 & high), -1)
    minima = np.concatenate((second & 63, lows >> 4 | second >> 2 & high), -1)
    return scales.view(np.int8), minima.view(np.int8)


def _q4_k(blocks: Bytes) -> Codes:
    scales, minima = _six_bits(blocks[..., 4:16])
    codes = _parts(blocks[..., 16:], _LOW_HIGH, 32, 15)
    return Codes(codes, _halves(blocks[..., :2]), scales, -_halves(blocks[..., 2:4]), minima)


def _q5_k(blocks: Bytes) -> Codes:
    scales, minima = _six_bits(blocks[..., 4:16])
    codes = _parts(blocks[..., 48:], _LOW_HIGH, 32, 15)
    codes |= _parts(blocks[..., 16:48], _BITS, 32, 1) << np.uint8(4)
    return Codes(codes, _halves(blocks[..., :2]), scales, -_halves(blocks[..., 2:4]), minima)


def _q6_k(blocks: Bytes) -> Codes:
    codes = _parts(blocks[..., :128], _LOW_HIGH, 64, 15)
    codes |= _parts(blocks[..., 128:192], _QUARTERS, 32, 3) << np.uint8(4)
    return Codes(codes, _halves(blocks[..., 208:]), blocks[..., 192:208].view(np.int8))


# By type: the kind of `ops.coded_weight`, bytes of a block, and how it is read.
_READERS: dict[Type, tuple[str, int, Callable[[Bytes], Codes]]] = {
    Type.Q8_0: ("int8", 34, _q8_0),
    Type.MXFP4: ("mxfp4", 17, _mxfp4),
    Type.Q4_0: ("int4", 18, _q4_0),
    Type.Q4_1: ("int4", 20, _q4_1),
    Type.Q5_0: ("q5_1", 22, _q5_0),
    Type.Q5_1: ("q5_1", 24, _q5_1),
    Type.IQ4_NL: ("iq4_nl", 18, _iq4_nl),
    Type.IQ4_XS: ("iq4_xs", 136, _iq4_xs),
    Type.Q2_K: ("q2_k", 84, _q2_k),
    Type.Q3_K: ("q3_k", 110, _q3_k),
    Type.Q4_K: ("q4_k", 144, _q4_k),
    Type.Q5_K: ("q5_k", 176, _q5_k),
    Type.Q6_K: ("q6_k", 210, _q6_k),
}


def code_kind(stored: Type) -> str | None:
    """The kind of codes that a type's blocks are; None: it has none."""
    return _READERS[stored][0] if stored in _READERS else None


def read_codes(stored: Type, rows: Bytes) -> Codes:
    """The numbers of rows [n, bytes] of a type that has a `code_kind`."""
    _, block_bytes, read = _READERS[stored]
    n = len(rows)
    found = read(rows.reshape(n, -1, block_bytes))
    arrays = (found.codes, found.factors, found.scales, found.minimum_factors, found.minima)
    by_row = (None if a is None else np.ascontiguousarray(a).reshape(n, -1) for a in arrays)
    return Codes(*by_row)  # type: ignore[arg-type]


def values_are_exact(stored: Type, rows: NDArray[Any]) -> bool:
    """Whether a kind's halves hold what the blocks say: -8 d and -16 d may be beyond them, and so
    may MXFP4's powers of two."""
    if stored is Type.MXFP4:
        powers = read_codes(stored, rows).factors
        return bool((np.isfinite(powers) & (powers > 0)).all())
    if stored not in (Type.Q4_0, Type.Q5_0):
        return True
    factors = _halves(rows.reshape(len(rows), -1, _READERS[stored][1])[..., :2])
    return bool((np.abs(factors) < np.float16(65504 / 16)).all())
