"""PackFile: tensors in one file, to be mapped and used where they lie.

    head    magic, where the index is, its SHA-256; written last, so that half a file is none
    data    tensors, each from a multiple of 64 on
    index   JSON: the key, what stands in the file by name, and of every tensor its place, type,
            shape and checksum

Nothing of a file is used before its owner, head, index, sizes and checksums were found to be right:
mapped pages that cannot be read would kill the process, and kernels trust what they get. The data
is written in pieces whose size and place suit large pages, which some systems keep files in: a step
streams all weights, and misses the TLB all the time on small ones.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import mmap
import os
import stat
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_HEAD = struct.Struct("<8sQQ32s")
_MAGIC = b"LoomPak1"
_ALIGNMENT = 64
_PIECE_BYTES = 8 << 20
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, which mmap has no name for
_MOST_INDEX_BYTES = 1 << 30
_ITEM_BYTES = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4}


class DamagedPack(Exception):
    """The file is not what was written, or not what is asked for; the message says how."""


class PackedTensor(NamedTuple):
    """Where a tensor is in a file. Args: dtype: torch's name."""

    offset: int
    dtype: str
    shape: tuple[int, ...]
    checksum: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class PackWriter:
    """A file that is being written; it is one when `finish` returns.

    Raises: OSError: from each method, where the file cannot be made or the disk is full.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        self._piece = memoryview(mmap.mmap(-1, _PIECE_BYTES))
        self._at = _ALIGNMENT  # behind the head
        self._tensors: list[PackedTensor] = []
        self._entries: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def add_tensor(self, data: memoryview, dtype: str, shape: Sequence[int], checksum: int) -> int:
        """Its number, for descriptions. data: its bytes."""
        tensor = PackedTensor(self._at, dtype, tuple(shape), checksum)
        assert len(data) == tensor.nbytes
        self._write(data)
        self._write(memoryview(bytes(-self._at % _ALIGNMENT)))
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def add(self, name: str, description: Any) -> None:
        """What JSON can hold, under a name."""
        self._entries[name] = description

    def finish(self, key: str) -> None:
        """Writes what is left, and the head. key: what the file may be used for."""
        index_at = self._at
        index = {"key": key, "entries": self._entries, "tensors": self._tensors}
        text = json.dumps(index, separators=(",", ":")).encode()
        self._write(memoryview(text))
        rest = self._at % _PIECE_BYTES
        self._put(self._piece[:rest], self._at - rest)
        head = _HEAD.pack(_MAGIC, index_at, len(text), hashlib.sha256(text).digest())
        self._put(memoryview(head), 0)

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self, data: memoryview) -> None:
        while len(data):
            begin = self._at % _PIECE_BYTES
            count = min(len(data), _PIECE_BYTES - begin)
            self._piece[begin : begin + count] = data[:count]
            self._at += count
            data = data[count:]
            if begin + count == _PIECE_BYTES:
                self._put(self._piece, self._at - _PIECE_BYTES)

    def _put(self, data: memoryview, at: int) -> None:
        while len(data):
            count = os.pwrite(self._descriptor, data, at)
            data, at = data[count:], at + count


class PackFile:
    """A file that was found to be whole but for its tensors' values.

    Args: tensors: in the order of their numbers. entries: what was added, by name.
    """

    def __init__(self, path: Path, key: str) -> None:
        """Raises: OSError: there is none. DamagedPack: it cannot be used."""
        self.path = path
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags)
        try:
            state = os.fstat(self._descriptor)
            _check_owner(state)
            self.size = state.st_size
            index_at, index = self._read_index()
            self.entries, self.tensors = _checked(index, key, index_at)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _read_index(self) -> tuple[int, Any]:
        head = self._pread(_HEAD.size, 0)
        if len(head) < _HEAD.size:
            raise DamagedPack("it is cut short")
        magic, at, count, digest = _HEAD.unpack(head)
        if magic != _MAGIC:
            raise DamagedPack("it was not written to the end, or is of another version")
        if count > _MOST_INDEX_BYTES or at + count != self.size:
            raise DamagedPack(f"it has {self.size} bytes, and {at + count} were written")
        text = self._pread(count, at)
        if hashlib.sha256(text).digest() != digest:
            raise DamagedPack("its index is not what was written")
        try:
            return at, json.loads(text)
        except (ValueError, RecursionError):
            raise DamagedPack("its index is no JSON") from None

    def _pread(self, count: int, at: int) -> bytes:
        buffer = bytearray(count)
        got = self._read(memoryview(buffer), at)
        return bytes(buffer[:got])

    def _read(self, buffer: memoryview, at: int) -> int:
        """Bytes that were read, fewer only at the end of the file."""
        got = 0
        while got < len(buffer):
            count = os.preadv(self._descriptor, [buffer[got:]], at + got)
            if not count:
                break
            got += count
        return got

    def read(self, tensor: PackedTensor, buffer: memoryview) -> None:
        """Copies a tensor's bytes. Raises: DamagedPack, OSError: they cannot be read."""
        if self._read(buffer, tensor.offset) != tensor.nbytes:
            raise DamagedPack("it is cut short")

    def map(self) -> mmap.mmap:
        """All of the file, read-only and shared with whoever maps it, in memory already.

        Raises: DamagedPack, OSError, ValueError: its pages cannot be had.
        """
        mapped = mmap.mmap(self._descriptor, self.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        for advice in (getattr(mmap, "MADV_HUGEPAGE", None), _POPULATE_READ):
            if advice is None or sys.platform != "linux":
                continue
            try:
                # What cannot be read is told here by an error, later by a signal that kills.
                mapped.madvise(advice)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a system that does not have it
                    raise DamagedPack(f"it cannot be mapped: {error.strerror}") from None
        return mapped

    def close(self) -> None:
        """What was mapped stays."""
        os.close(self._descriptor)


def on_large_pages(address: int, count: int) -> bool:
    """Whether the most part of what is mapped from an address on lies on large pages; false where
    the system does not tell."""
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return False
    inside, large_kib = False, 0
    for line in lines:
        first = line.split(None, 1)[0]
        if not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = address < end and begin < address + count
        elif inside and first in ("FilePmdMapped:", "ShmemPmdMapped:"):
            large_kib += int(line.split()[1])
    return 2 * 1024 * large_kib > count


def _check_owner(state: os.stat_result) -> None:
    """Weights that somebody else has written would be another model."""
    if not stat.S_ISREG(state.st_mode):
        raise DamagedPack("it is no file")
    if state.st_uid not in (os.geteuid(), 0):
        raise DamagedPack(f"it belongs to another user (id {state.st_uid})")
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DamagedPack("it can be written by others")


def _checked(index: Any, key: str, end: int) -> tuple[dict[str, Any], list[PackedTensor]]:
    """Entries and tensors of an index. end: of the data."""
    try:
        entries, tensors = index["entries"], [_tensor(end, *one) for one in index["tensors"]]
        wrong = not isinstance(entries, dict)
    except (KeyError, TypeError, ValueError):
        raise DamagedPack("its index names what cannot be in it") from None
    if wrong or index.get("key") != key:
        raise DamagedPack("it is of another model or layout")
    return entries, tensors


def _tensor(end: int, offset: Any, dtype: Any, shape: Iterable[Any], checksum: Any) -> PackedTensor:
    tensor = PackedTensor(offset, dtype, tuple(shape), checksum)
    numbers = (offset, checksum, *tensor.shape)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError
    if offset < _HEAD.size or offset % _ALIGNMENT or offset + tensor.nbytes > end:
        raise ValueError
    return tensor
