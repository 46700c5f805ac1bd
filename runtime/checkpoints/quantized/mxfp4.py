"""MXFP4 (OCP microscaling formats 1.0) as gpt-oss has it: blocks of 32 four-bit floats, two to a
byte, the lower half first, and a power of two for each block.

`NAME_blocks` [E, rows, blocks, 16] and `NAME_scales` [E, rows, blocks] hold a row per output; the
tensor NAME has the inputs first, [E, 32 blocks, rows]. Its codes are one matrix [E rows, 32 blocks]
of the outputs of all experts, one below the other.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ops.coded_weight import E2M1_VALUES, GroupedMatrix
from runtime.checkpoints.quantized.stored import StoredWeight

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from runtime.checkpoints.quantized.stored import Floats, Reader, Settings

_VALUES = np.array(E2M1_VALUES, np.float32)
_BIAS = 127


def find_mxfp4(reader: Reader, settings: Settings) -> dict[str, StoredWeight]:
    found = {}
    for name in reader.ending("_blocks"):
        experts, rows, blocks, _ = reader.shape(f"{name}_blocks", 4)
        parts = (f"{name}_blocks", f"{name}_scales")
        shape = (experts, 32 * blocks, rows)
        values, codes = partial(_values, reader, name), partial(_codes, reader, name)
        found[name] = StoredWeight(shape, parts, values, codes)
    return found


def _values(reader: Reader, name: str) -> Floats:
    packed, scales = _stored(reader, name)
    experts, rows, blocks = scales.shape
    values = np.empty((experts, rows, blocks, 16, 2), np.float32)
    values[..., 0], values[..., 1] = _VALUES[packed & 15], _VALUES[packed >> 4]
    exponents = scales.astype(np.int32)[..., None, None] - _BIAS
    np.ldexp(values, exponents, out=values)
    return values.reshape(experts, rows, -1).transpose(0, 2, 1)


def _codes(reader: Reader, name: str) -> GroupedMatrix | None:
    """None where a scale has no place in a float32, as 2^128 has none."""
    scales = _stored(reader, name)[1]
    experts, rows, blocks = scales.shape
    if (scales == 255).any():
        return None

    def read(first: int, last: int) -> NDArray[Any]:
        packed = _stored(reader, name)[0].reshape(experts * rows, -1)[first:last]
        return np.stack((packed & 15, packed >> 4), axis=-1).reshape(last - first, -1)

    # The exponent's place in a float32, whose numbers below 2^-126 have none.
    powers = np.maximum(scales.astype(np.uint32) << 23, 1 << 22).view(np.float32)
    n = experts * rows
    return GroupedMatrix("mxfp4", n, 32 * blocks, powers.reshape(n, blocks), None, read)


def _stored(reader: Reader, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Blocks and scales."""
    experts, rows, blocks, _ = reader.shape(f"{name}_blocks", 4)
    packed = reader.integers(f"{name}_blocks", "uint8", (experts, rows, blocks, 16))
    return packed, reader.integers(f"{name}_scales", "uint8", (experts, rows, blocks))
