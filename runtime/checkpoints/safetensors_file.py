"""The safetensors format: eight bytes of header length, a JSON header, then the tensors' bytes.

Read by mapping the file, so that a model's weights are shared with the page cache and nothing
is copied before it is used. Format: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import mmap
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from runtime.checkpoints.checkpoint import RawTensor, TensorInfo
from runtime.checkpoints.json_file import parse_json_object
from runtime.checkpoints.mapped_pages import release_pages
from runtime.errors import ModelError, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

# safetensors' name of a type, torch's name, bytes of an element
_TYPES = (
    ("F64", "float64", 8),
    ("F32", "float32", 4),
    ("F16", "float16", 2),
    ("BF16", "bfloat16", 2),
    ("I64", "int64", 8),
    ("I32", "int32", 4),
    ("I16", "int16", 2),
    ("I8", "int8", 1),
    ("U8", "uint8", 1),
    ("BOOL", "bool", 1),
    ("F8_E4M3", "float8_e4m3fn", 1),
    ("F8_E5M2", "float8_e5m2", 1),
)
_BY_CODE = {code: (dtype, size) for code, dtype, size in _TYPES}
_CODE_OF = {dtype: code for code, dtype, _ in _TYPES}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class SafetensorsFile:
    """One mapped file. It stays open as long as the object, or a tensor read from it, lives."""

    def __init__(self, path: Path) -> None:
        """Raises: ModelError: the file is missing, cut short, or its header is not valid."""
        self.path = path
        try:
            with path.open("rb") as file:
                # ACCESS_COPY: writable for torch.frombuffer, yet private to this process.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read ({error})") from error
        header, self._data_start = self._read_header()
        self._offsets: dict[str, tuple[int, int]] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for name, entry in header.items():
            if name != "__metadata__":
                self._add(name, entry)

    def _read_header(self) -> tuple[dict[str, Any], int]:
        length = int.from_bytes(self._map[:8], "little")
        if len(self._map) < 8 or length > min(_MAX_HEADER_BYTES, len(self._map) - 8):
            raise ModelError(f"{self.path}: not a safetensors file, or cut short")
        header = parse_json_object(self._map[8 : 8 + length], f"{self.path}: the header")
        return header, 8 + length

    def _add(self, name: str, entry: Any) -> None:
        try:
            dtype, item_bytes = _BY_CODE[entry["dtype"]]
            shape = _sizes(entry["shape"])
            begin, end = _sizes(entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise ModelError(
                f"{self.path}: bad header entry of tensor {name!r}: {shown(entry)}"
            ) from None
        if end - begin != math.prod(shape) * item_bytes:
            raise ModelError(
                f"{self.path}: tensor {name!r} of shape {list(shape)} ({dtype}) needs"
                f" {math.prod(shape) * item_bytes} bytes, the header gives it {end - begin}"
            )
        if self._data_start + end > len(self._map):
            raise ModelError(f"{self.path}: cut short: tensor {name!r} ends beyond the file's end")
        self._offsets[name] = (begin, end)
        self.tensors[name] = TensorInfo(shape, dtype)

    def read(self, name: str) -> RawTensor:
        """The tensor's bytes, mapped. `name` must be one of `tensors`."""
        begin, end = (self._data_start + offset for offset in self._offsets[name])
        info = self.tensors[name]
        view = memoryview(self._map)[begin:end]
        release = partial(release_pages, self._map, begin, end)
        return RawTensor(info.shape, info.dtype, view, release)


def _sizes(values: Any) -> tuple[int, ...]:
    """A list of sizes. Raises: ValueError, TypeError: it is none."""
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError
    return tuple(values)


def write_safetensors(
    path: Path, infos: Mapping[str, TensorInfo], tensors: Iterable[RawTensor]
) -> None:
    """Writes tensors (in the order of `infos`, one in memory at a time) and syncs the file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, info in infos.items():
        code = _CODE_OF[info.dtype]
        end = offset + math.prod(info.shape) * _BY_CODE[code][1]
        header[name] = {"dtype": code, "shape": list(info.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants tensors aligned to eight bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors:
            file.write(tensor.buffer)
        if file.tell() != 8 + len(text) + offset:
            raise ModelError(f"{path}: tensors and their shapes do not match")
        file.flush()
        os.fsync(file.fileno())
