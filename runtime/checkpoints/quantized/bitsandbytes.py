"""Four-bit checkpoints of bitsandbytes (nf4 and fp4; Dettmers et al. 2023, arXiv:2305.14314).

A weight is a stream of nibbles, the higher one first, each an index into `quant_map`; blocks of
them share an `absmax`. With double quantization that is a byte: an index into `nested_quant_map`,
times its own block's `nested_absmax`, plus an offset. The sizes are JSON in a tensor of bytes.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ops.coded_weight import GroupedMatrix
from runtime.checkpoints.json_file import parse_json_object
from runtime.checkpoints.quantized.stored import StoredWeight

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from runtime.checkpoints.quantized.stored import Floats, Reader, Settings

_STATE = ".quant_state.bitsandbytes__"
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")


def find_bitsandbytes(reader: Reader, settings: Settings) -> dict[str, StoredWeight]:
    """Raises: ModelError: the settings are not of this layout."""
    settings.refuse("load_in_8bit", "_load_in_8bit")
    kind = settings.one_of("bnb_4bit_quant_type", ("nf4", "fp4"))
    found = {}
    for name in reader.ending(_STATE + kind):
        state = _state(reader, name + _STATE + kind)
        parts = (name, name + _STATE + kind, *reader.present(name, *_PARTS))
        shape = tuple(state["shape"])
        values, codes = partial(_values, reader, name, state), partial(_codes, reader, name, state)
        found[name] = StoredWeight(shape, parts, values, codes)
    return found


def _state(reader: Reader, name: str) -> dict[str, Any]:
    content = reader.integers(name, "uint8").tobytes()
    state = parse_json_object(content, f"{reader.checkpoint.path}: tensor {name!r}")
    shape = state.get("shape")
    sizes = [state.get("blocksize"), state.get("nested_blocksize", 1)]
    sizes += shape if isinstance(shape, list) else []
    if len(sizes) != 4 or not all(type(size) is int and 0 < size < 2**31 for size in sizes):
        raise reader.wrong(name, "other content", "shape and blocksize")
    offset = state.get("nested_offset", 0.0)
    if type(offset) not in (int, float) or not math.isfinite(offset):
        raise reader.wrong(name, "another nested_offset", "a number")
    return state


def _values(reader: Reader, name: str, state: dict[str, Any]) -> Floats:
    count = math.prod(state["shape"])
    nibbles = _nibbles(_packed(reader, name, count))[:count]
    blocks = -(-count // state["blocksize"])
    scales = _absmax(reader, name, state, blocks).repeat(state["blocksize"])[:count]
    values: Floats = reader.floats(f"{name}.quant_map", (16,))[nibbles] * scales
    return values.reshape(state["shape"])


def _codes(reader: Reader, name: str, state: dict[str, Any]) -> GroupedMatrix | None:
    """None where a block goes on in the next row."""
    (n, k), block = state["shape"], state["blocksize"]
    if k % block or k % 2:
        return None
    scales = _absmax(reader, name, state, n * k // block).reshape(n, -1)

    def read(first: int, last: int) -> NDArray[np.uint8]:
        rows = _packed(reader, name, n * k)[first * k // 2 : last * k // 2]
        return _nibbles(rows).reshape(last - first, k)

    table = reader.floats(f"{name}.quant_map", (16,))
    return GroupedMatrix("nf4", n, k, scales, None, read, table=table)


def _packed(reader: Reader, name: str, count: int) -> NDArray[np.uint8]:
    packed: NDArray[np.uint8] = reader.integers(name, "uint8").reshape(-1)
    if len(packed) != -(-count // 2):
        raise reader.wrong(name, f"{len(packed)} bytes", f"{-(-count // 2)}")
    return packed


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.stack((packed >> 4, packed & 15), axis=-1).reshape(-1)


def _absmax(reader: Reader, name: str, state: dict[str, Any], blocks: int) -> Floats:
    if f"{name}.nested_absmax" not in reader.names:
        return reader.floats(f"{name}.absmax", (blocks,))
    codes = reader.integers(f"{name}.absmax", "uint8", (blocks,))
    size = state["nested_blocksize"]
    outer = reader.floats(f"{name}.nested_absmax", (-(-blocks // size),)).repeat(size)[:blocks]
    inner: Floats = reader.floats(f"{name}.nested_quant_map", (256,))[codes]
    return inner * outer + np.float32(state.get("nested_offset", 0.0))
