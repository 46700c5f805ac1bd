"""The GGUF format: metadata of typed values, descriptions of the tensors, then the tensors' bytes.

Read by mapping the file, every length checked against its end: files come from anywhere, and are
cut short by downloads. (The `gguf` package's reader makes three arrays per string, which takes
seconds for a vocabulary, and follows a damaged length for ever.)

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from runtime.checkpoints.mapped_pages import release_pages
from runtime.errors import ModelError, shown

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # of the tensors, where general.alignment does not say otherwise
_STRING, _ARRAY = 8, 9
# By the format's number of a type: its struct code. 6 and 12 are floats, 7 is a bool.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STORED: dict[GGMLQuantizationType, np.dtype[Any]] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(np.uint16),
}


class GgufTensor(NamedTuple):
    """One tensor of a file.

    Args:
        shape: outermost dimension first (the file lists the innermost first).
        data: read-only, mapped. Plain types in `shape` (bfloat16 as uint16), quantized ones as
            bytes, with the bytes of a row as the last dimension.
        release: gives back the memory of its pages; they are read again when they are touched.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    data: NDArray[Any]
    release: Callable[[], None]


class GgufFile:
    """One mapped file: its metadata by key, and its tensors in order."""

    def __init__(self, path: Path) -> None:
        """Raises: ModelError: not a GGUF file, of a version not known here, cut short or
        damaged."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read ({error})") from None
        self._at = 0
        self.metadata: dict[str, Any] = {}
        tensors, pairs = self._read_head()
        for _ in range(pairs):
            key = self._string("a key")
            if key in self.metadata:
                raise ModelError(f"{path}: has the key {key!r} twice")
            self.metadata[key] = self._value(self._scalar("I"), key)
        self.tensors = self._read_tensors(tensors)

    def _read_head(self) -> tuple[int, int]:
        if self._map[:4] != _MAGIC:
            raise ModelError(f"{self.path}: not a GGUF file")
        self._at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            kind = "big-endian" if version & 0xFFFF == 0 else f"of version {version}"
            raise ModelError(f"{self.path}: is {kind}; little-endian files of {_VERSIONS} are read")
        return self._scalar("Q"), self._scalar("Q")

    def _take(self, size: int) -> int:
        """Where the next `size` bytes begin; they are then behind."""
        begin = self._at
        if size > len(self._map) - begin:
            raise ModelError(f"{self.path}: cut short or damaged at byte {begin}")
        self._at = begin + size
        return begin

    def _scalar(self, code: str) -> Any:
        form = struct.Struct("<" + code)
        return form.unpack_from(self._map, self._take(form.size))[0]

    def _string(self, what: str) -> str:
        size = self._scalar("Q")
        begin = self._take(size)
        try:
            return self._map[begin : begin + size].decode()
        except UnicodeDecodeError:
            raise ModelError(f"{self.path}: {what} is not UTF-8 (byte {begin})") from None

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(self._scalar("I"), self._scalar("Q"), key)
        raise ModelError(f"{self.path}: {key} is of type {kind}, which GGUF does not have")

    def _array(self, kind: int, count: int, key: str) -> list[Any]:
        if kind == _STRING:
            if count > (len(self._map) - self._at) // 8:  # of its length alone
                raise ModelError(f"{self.path}: cut short or damaged in {key}")
            return [self._string(key) for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelError(f"{self.path}: {key} is an array of type {kind}, which is not read")
        dtype = np.dtype("<" + _SCALARS[kind])
        begin = self._take(count * dtype.itemsize)
        values: list[Any] = np.frombuffer(self._map, dtype, count, begin).tolist()
        return values

    def _read_tensors(self, count: int) -> list[GgufTensor]:
        heads = [self._tensor_head() for _ in range(count)]
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ModelError(f"{self.path}: general.alignment {shown(alignment)}: no power of two")
        start = math.ceil(self._at / alignment) * alignment
        names = [name for name, *_ in heads]
        if len(set(names)) < len(names):
            raise ModelError(f"{self.path}: has two tensors of one name")
        return [self._tensor(*head, start=start) for head in heads]

    def _tensor_head(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string("a tensor's name")
        dimensions = self._scalar("I")
        if dimensions > 4:
            raise ModelError(f"{self.path}: tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))[::-1]
        if not shape or 0 in shape:
            raise ModelError(f"{self.path}: tensor {name!r} has shape {list(shape)}: it is empty")
        number = self._scalar("I")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise ModelError(f"{self.path}: tensor {name!r} is of unknown type {number}") from None
        return name, shape, kind, self._scalar("Q")

    def _tensor(
        self, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int, start: int
    ) -> GgufTensor:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise ModelError(
                f"{self.path}: tensor {name!r} ({kind.name}) has rows of {shape[-1]} values, no"
                f" multiple of {block}"
            )
        stored = (*shape[:-1], shape[-1] // block * block_bytes)
        size, begin = math.prod(stored), start + offset
        if begin + size > len(self._map):
            raise ModelError(
                f"{self.path}: cut short or damaged: tensor {name!r} of {size} bytes at {begin}"
                f" ends beyond the file's {len(self._map)} bytes"
            )
        dtype = _STORED.get(kind, np.dtype(np.uint8))
        data = np.frombuffer(self._map, dtype, size // dtype.itemsize, begin)
        data = data.reshape(shape if kind in _STORED else stored)
        release = partial(release_pages, self._map, begin, begin + size)
        return GgufTensor(name, shape, kind, data, release)
