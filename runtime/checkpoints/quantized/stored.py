"""What the quantized layouts share: weights that stand in several tensors, and numbers as numpy
arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ops.coded_weight import GroupedMatrix
from runtime.checkpoints.checkpoint import Checkpoint, tensor_info
from runtime.errors import ModelError, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight that a checkpoint holds in other tensors than one of its name.

    Args:
        shape: of the values. parts: the tensors that it stands in.
        values: reads and dequantizes them.
        codes: the same as codes in groups; None where there is no place for them.
    """

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    values: Callable[[], Floats]
    codes: Callable[[], GroupedMatrix | None] = lambda: None


class Reader:
    """Parts of stored weights. All methods raise ModelError, naming the tensor."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.names = checkpoint.tensors

    def ending(self, suffix: str) -> list[str]:
        """What stands before this suffix, for each tensor that has it."""
        return [name.removesuffix(suffix) for name in self.names if name.endswith(suffix)]

    def present(self, stem: str, *suffixes: str) -> tuple[str, ...]:
        """The tensors of these suffixes that there are."""
        return tuple(stem + suffix for suffix in suffixes if stem + suffix in self.names)

    def shape(self, name: str, dimensions: int) -> tuple[int, ...]:
        shape = tensor_info(self.checkpoint, name).shape
        if len(shape) != dimensions or not all(shape):
            raise self.wrong(name, f"shape {list(shape)}", f"{dimensions} dimensions")
        return shape

    def floats(self, name: str, shape: tuple[int, ...] | None = None) -> Floats:
        """Its values as float32. shape: that it must have, or be the only value of."""
        self._check(name, ("float32", "float16", "bfloat16", *_FLOAT8), shape)
        raw = self.checkpoint.read(name)
        if raw.dtype == "bfloat16":
            halves = np.frombuffer(raw.buffer, np.uint16).astype(np.uint32)
            values: Floats = (halves << 16).view(np.float32)
        elif raw.dtype in _FLOAT8:
            values = _FLOAT8[raw.dtype][np.frombuffer(raw.buffer, np.uint8)]
        else:
            values = np.frombuffer(raw.buffer, raw.dtype).astype(np.float32)
        return values.reshape(raw.shape if shape is None else shape)

    def integers(self, name: str, dtype: str, shape: tuple[int, ...] | None = None) -> NDArray[Any]:
        """Its values in the type that they must have; those of 8-bit floats as bytes."""
        self._check(name, (dtype,), shape)
        raw = self.checkpoint.read(name)
        kind = "uint8" if raw.dtype in _FLOAT8 else raw.dtype
        return np.frombuffer(raw.buffer, kind).reshape(raw.shape)

    def wrong(self, name: str, given: str, expected: str) -> ModelError:
        return ModelError(
            f"{self.checkpoint.path}: tensor {name!r} is of {given}, its layout has {expected}"
        )

    def _check(self, name: str, dtypes: Sequence[str], shape: tuple[int, ...] | None) -> None:
        info = tensor_info(self.checkpoint, name)
        if info.dtype not in dtypes:
            raise self.wrong(name, f"type {info.dtype}", " or ".join(dtypes))
        if shape is not None and info.shape != shape:
            raise self.wrong(name, f"shape {list(info.shape)}", f"{list(shape)}")


class Settings:
    """A checkpoint's `quantization_config`, or a part of it, read strictly: what is not known to
    leave the values alone is refused."""

    def __init__(self, values: Mapping[str, Any], where: str = "quantization_config") -> None:
        self.values = values
        self.where = where

    def one_of(self, key: str, allowed: Sequence[Any], default: Any = None) -> Any:
        """The value, which must be one of these."""
        value = self.values.get(key, default)
        if not any(value == one and type(value) is type(one) for one in allowed):
            choices = ", ".join("null" if one is None else str(one) for one in allowed)
            raise ModelError(
                f"config.json: {self.where}: {key} is {shown(value)}; it must be one of {choices}"
            )
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if type(value) is not int or not -1 <= value < 2**31:
            raise ModelError(
                f"config.json: {self.where}: {key} is {shown(value)}; it must be an integer"
            )
        return value

    def refuse(self, *keys: str) -> None:
        """Raises where one of these is set."""
        for key in keys:
            if self.values.get(key):
                raise ModelError(
                    f"config.json: {self.where}: {key} {shown(self.values[key])} is not supported"
                )


def block_size(value: Any, where: str) -> tuple[int, int] | None:
    """Rows and columns of a block; None where the config has none. Raises: ModelError."""
    if value is None:
        return None
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 0 < size < 2**31 for size in sizes):
        raise ModelError(f"config.json: {where} is {shown(value)}; it must be two sizes")
    return sizes[0], sizes[1]


def unpacked(words: NDArray[np.int32], bits: int, axis: int) -> NDArray[np.int32]:
    """Unsigned values of `bits` bits in 32-bit words along an axis, the lowest bits first."""
    words = np.moveaxis(words, axis, -1).view(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    values = ((words[..., None] >> shifts) & np.uint32(2**bits - 1)).astype(np.int32)
    return np.moveaxis(values.reshape(*words.shape[:-1], -1), -1, axis)


def _float8(exponent_bits: int, bias: int, *, infinities: bool) -> Floats:
    """The values of all 256 codes."""
    codes = np.arange(256)
    mantissa_bits = 7 - exponent_bits
    exponent = codes >> mantissa_bits & 2**exponent_bits - 1
    mantissa = (codes & 2**mantissa_bits - 1) / 2**mantissa_bits
    normal = (1 + mantissa) * 2.0 ** (exponent - bias)
    values = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), normal)
    if infinities:
        values[exponent == 2**exponent_bits - 1] = np.nan
        values[codes & 127 == (2**exponent_bits - 1) << mantissa_bits] = np.inf
    else:
        values[codes & 127 == 127] = np.nan
    signed: Floats = np.where(codes & 128, -values, values).astype(np.float32)
    return signed


# OCP 8-bit floating point specification: E4M3 has no infinities, and one NaN of each sign.
_FLOAT8 = {
    "float8_e4m3fn": _float8(4, 7, infinities=False),
    "float8_e5m2": _float8(5, 15, infinities=True),
}


def in_groups(
    bits: int,
    scales: Floats,
    zeros: NDArray[np.uint8],
    index: NDArray[Any],
    read: Callable[[int, int], NDArray[Any]],
) -> GroupedMatrix | None:
    """Codes in groups of one size, whatever their order; None where sizes differ.

    Args:
        scales, zeros: [n, groups]. index: [k], the group of each input.
        read: codes of rows first to last - 1, in the order of the inputs.
    """
    (n, groups), k = scales.shape, len(index)
    order = np.argsort(index, kind="stable").astype(np.int32)
    if k % groups or (index[order] != np.arange(k) // (k // groups)).any():
        return None
    if (order[1:] > order[:-1]).all():
        return GroupedMatrix(f"int{bits}", n, k, scales, zeros, read)

    def ordered(first: int, last: int) -> NDArray[Any]:
        return read(first, last)[:, order]

    return GroupedMatrix(f"int{bits}", n, k, scales, zeros, ordered, order)
