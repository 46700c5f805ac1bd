"""Checkpoints of compressed-tensors (llm-compressor): int8, FP8, or 4 and 8 bits in words.

    weight[n, k] = weight_scale[group of (n, k)] * (q[n, k] - weight_zero_point[group of (n, k)])

A group is the whole tensor, a row, a stretch of a row, or a block. `pack-quantized` has q + 2^(b-1)
in 32-bit words along the inputs, and zero points alike along the outputs. Activations that the
config wants quantized are not: what is computed is closer to the float model than was meant.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ops.coded_weight import GroupedMatrix
from runtime.checkpoints.quantized.stored import (
    Settings,
    StoredWeight,
    block_size,
    in_groups,
    unpacked,
)
from runtime.errors import ModelError, shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from runtime.checkpoints.quantized.stored import Floats, Reader

_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
_STRATEGIES = ("tensor", "channel", "group", "block")
_PARTS = (
    *(".weight_scale", ".weight_zero_point", ".weight_g_idx"),
    *(".input_scale", ".input_zero_point"),  # of activations, which are not quantized here
)


def find_compressed(reader: Reader, settings: Settings) -> dict[str, StoredWeight]:
    """Raises: ModelError: the settings are not of these layouts."""
    settings.refuse("sparsity_config", "transform_config", "kv_cache_scheme")
    settings.one_of("quantization_status", ("compressed",), "compressed")
    form, (bits, block) = settings.one_of("format", _FORMATS), _scheme(settings)
    found = {}
    for stem in reader.ending(".weight_scale"):
        parts = reader.present(stem, *_PARTS)
        if form == "pack-quantized":
            given = reader.integers(f"{stem}.weight_shape", "int64", (2,)).tolist()
            rows, columns = given
            if min(given) < 1 or max(given) >= 2**31:
                raise reader.wrong(f"{stem}.weight_shape", f"values {given}", "two sizes")
            read = partial(_packed, reader, stem, (rows, columns), bits)
            codes = partial(_packed_codes, reader, stem, (rows, columns), bits)
            parts = (*parts, f"{stem}.weight_packed", f"{stem}.weight_shape")
        else:
            rows, columns = reader.shape(f"{stem}.weight", 2)
            read = partial(_plain, reader, stem, (rows, columns), block)
            codes = partial(_plain_codes, reader, stem, (rows, columns), block)
            parts = (*parts, f"{stem}.weight")
        found[f"{stem}.weight"] = StoredWeight((rows, columns), parts, read, codes)
    return found


def _scheme(settings: Settings) -> tuple[int, tuple[int, int] | None]:
    """Bits and block of all weights.

    Raises: ModelError: groups of modules differ, or are of another kind.
    """
    groups = settings.values.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelError(
            f"config.json: quantization_config: config_groups is {shown(groups)}; it must be an"
            " object"
        )
    found = set()
    for name, group in groups.items():
        where = f"quantization_config: config_groups: {name}: weights"
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise ModelError(f"config.json: {where} is {shown(weights)}; it must be an object")
        scheme = Settings(weights, where)
        scheme.one_of("type", ("int", "float"))
        scheme.one_of("strategy", _STRATEGIES)
        bits = scheme.one_of("num_bits", (4, 8))
        if scheme.values["type"] == "float" and bits != 8:
            raise ModelError(f"config.json: {where}: floats of {bits} bits are not supported")
        block = None
        if weights["strategy"] == "block":
            block = block_size(weights.get("block_structure"), f"{where}: block_structure")
        found.add((bits, block))
    if len(found) != 1:
        raise ModelError(
            "config.json: quantization_config: weights of different kinds in one model are not"
            " supported"
        )
    return found.pop()


def _plain(
    reader: Reader, stem: str, shape: tuple[int, int], block: tuple[int, int] | None
) -> Floats:
    name, zeros = f"{stem}.weight", f"{stem}.weight_zero_point"
    scale = f"{stem}.weight_scale"
    scales = spread(reader, scale, reader.floats(scale), shape, block)
    if reader.names[name].dtype != "int8":
        return reader.floats(name) * scales
    values: Floats = reader.integers(name, "int8").astype(np.float32)
    if zeros in reader.names:
        given = reader.integers(zeros, "int8").astype(np.float32)
        values -= spread(reader, zeros, given, shape, block)
    return values * scales


def _packed(reader: Reader, stem: str, shape: tuple[int, int], bits: int) -> Floats:
    values: Floats = _packed_integers(reader, stem, shape, bits).astype(np.float32)
    scales = reader.floats(f"{stem}.weight_scale")
    name, index = f"{stem}.weight_zero_point", f"{stem}.weight_g_idx"
    zeros = _packed_zeros(reader, stem, shape[0], bits, scales.shape[1:])
    if zeros is None:
        values -= 2 ** (bits - 1)
    if index in reader.names:
        group = reader.integers(index, "int32", (shape[1],))
        if group.min() < 0 or group.max() >= scales.shape[-1]:
            raise reader.wrong(index, f"groups up to {group.max()}", f"{scales.shape[-1]} of them")
        if zeros is not None:
            values -= zeros[:, group]
        return values * scales[:, group]
    if zeros is not None:
        values -= spread(reader, name, zeros, shape)
    return values * spread(reader, f"{stem}.weight_scale", scales, shape)


def _packed_integers(
    reader: Reader, stem: str, shape: tuple[int, int], bits: int, rows: slice = slice(None)
) -> NDArray[np.int32]:
    words = (shape[0], -(-shape[1] // (32 // bits)))
    packed = reader.integers(f"{stem}.weight_packed", "int32", words)[rows]
    return unpacked(packed, bits, 1)[:, : shape[1]]


def _packed_zeros(
    reader: Reader, stem: str, rows: int, bits: int, groups: tuple[int, ...]
) -> Floats | None:
    """[rows, *groups], unsigned as the codes are."""
    name = f"{stem}.weight_zero_point"
    if name not in reader.names:
        return None
    packed = reader.integers(name, "int32", (-(-rows // (32 // bits)), *groups))
    return unpacked(packed, bits, 0)[:rows].astype(np.float32)


def _packed_codes(
    reader: Reader, stem: str, shape: tuple[int, int], bits: int
) -> GroupedMatrix | None:
    scales, name = reader.floats(f"{stem}.weight_scale"), f"{stem}.weight_g_idx"
    if scales.ndim != 2 or scales.shape[0] != shape[0] or shape[1] % scales.shape[1]:
        return None
    index: NDArray[Any] = np.arange(shape[1]) // (shape[1] // scales.shape[1])
    if name in reader.names:
        index = reader.integers(name, "int32", (shape[1],))
    zeros = _packed_zeros(reader, stem, shape[0], bits, scales.shape[1:])
    middle = np.full(scales.shape, 2 ** (bits - 1), np.uint8)
    return in_groups(
        bits,
        scales,
        middle if zeros is None else zeros.astype(np.uint8),
        index,
        lambda first, last: _packed_integers(reader, stem, shape, bits, slice(first, last)),
    )


def _plain_codes(
    reader: Reader, stem: str, shape: tuple[int, int], block: tuple[int, int] | None
) -> GroupedMatrix | None:
    """Integers with a scale for the whole or for each row, or floats."""
    name, zero = f"{stem}.weight", f"{stem}.weight_zero_point"
    if reader.names[name].dtype != "int8":
        return float_codes(reader, name, f"{stem}.weight_scale", shape, block)
    if block:
        return None
    scales = reader.floats(f"{stem}.weight_scale")
    zeros = reader.integers(zero, "int8") if zero in reader.names else np.zeros(1, np.int8)
    if scales.size not in (1, shape[0]) or zeros.size not in (1, shape[0]):
        return None

    def unsigned(values: NDArray[np.int8]) -> NDArray[np.uint8]:
        return values.view(np.uint8) ^ np.uint8(128)

    def of_rows(values: NDArray[Any]) -> NDArray[Any]:
        return np.broadcast_to(values.reshape(-1, 1), (shape[0], 1))

    def read(first: int, last: int) -> NDArray[Any]:
        return unsigned(reader.integers(name, "int8")[first:last])

    return GroupedMatrix("int8", *shape, of_rows(scales), of_rows(unsigned(zeros)), read)


def spread(
    reader: Reader,
    name: str,
    scales: Floats,
    shape: tuple[int, int],
    block: tuple[int, int] | None = None,
) -> Floats:
    """Scales of the whole, of rows, or of blocks, as an array that `shape` can be multiplied by.

    Args:
        block: its size, where that is known; else blocks must divide the shape.
    """
    rows, width = _scales_of_rows(reader, name, scales, shape, block)
    return rows.repeat(width, 1)[:, : shape[1]]


def float_codes(
    reader: Reader, name: str, scale: str, shape: tuple[int, int], block: tuple[int, int] | None
) -> GroupedMatrix | None:
    """A weight of 8-bit floats, of which one kind has a place; scales and blocks as in `spread`."""
    if reader.names[name].dtype != "float8_e4m3fn":
        return None
    rows, width = _scales_of_rows(reader, scale, reader.floats(scale), shape, block)
    groups = rows.shape[1]
    if groups > 1 and groups * width != shape[1]:
        return None
    return GroupedMatrix(
        "fp8",
        *shape,
        np.broadcast_to(rows, (shape[0], groups)),
        None,
        lambda first, last: reader.integers(name, "float8_e4m3fn")[first:last],
    )


def _scales_of_rows(
    reader: Reader,
    name: str,
    scales: Floats,
    shape: tuple[int, int],
    block: tuple[int, int] | None,
) -> tuple[Floats, int]:
    """Scales of each row's stretches, or of all rows', and the length of a stretch."""
    if scales.size == 1:
        return scales.reshape(1, 1), shape[1]
    if scales.ndim == 1:
        scales = scales[:, None]
    if scales.ndim != 2 or not scales.size:
        raise reader.wrong(name, f"shape {list(scales.shape)}", "two dimensions")
    count = scales.shape
    size = block or (max(1, shape[0] // count[0]), max(1, shape[1] // count[1]))
    fits = all(-(-n // b) == c for n, b, c in zip(shape, size, count, strict=True))
    if not fits or (block is None and any(n % b for n, b in zip(shape, size, strict=True))):
        raise reader.wrong(name, f"shape {list(count)}", f"one for each block of {list(shape)}")
    return scales.repeat(size[0], 0)[: shape[0]], size[1]
