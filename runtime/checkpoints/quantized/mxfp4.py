"""MXFP4 (OCP microscaling formats 1.0) as gpt-oss has it: blocks of 32 four-bit floats, two to a
byte, the lower half first, and a power of two for each block.

`NAME_blocks` [E, rows, blocks, 16] and `NAME_scales` [E, rows, blocks] hold a row per output; the
tensor NAME has the inputs first, [E, 32 blocks, rows].
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from runtime.checkpoints.quantized.stored import StoredWeight

if TYPE_CHECKING:
    from runtime.checkpoints.quantized.stored import Floats, Reader, Settings

_HALF = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_VALUES = np.array([*_HALF, *(-value for value in _HALF)], np.float32)
_BIAS = 127


def find_mxfp4(reader: Reader, settings: Settings) -> dict[str, StoredWeight]:
    found = {}
    for name in reader.ending("_blocks"):
        experts, rows, blocks, _ = reader.shape(f"{name}_blocks", 4)
        parts = (f"{name}_blocks", f"{name}_scales")
        shape = (experts, 32 * blocks, rows)
        found[name] = StoredWeight(shape, parts, partial(_values, reader, name))
    return found


def _values(reader: Reader, name: str) -> Floats:
    experts, rows, blocks, _ = reader.shape(f"{name}_blocks", 4)
    packed = reader.integers(f"{name}_blocks", "uint8", (experts, rows, blocks, 16))
    scales = reader.integers(f"{name}_scales", "uint8", (experts, rows, blocks))
    values = np.empty((experts, rows, blocks, 16, 2), np.float32)
    values[..., 0], values[..., 1] = _VALUES[packed & 15], _VALUES[packed >> 4]
    exponents = scales.astype(np.int32)[..., None, None] - _BIAS
    np.ldexp(values, exponents, out=values)
    return values.reshape(experts, rows, -1).transpose(0, 2, 1)
