"""Files of packed tensors: what was written comes back, and nothing else is taken for it."""

from __future__ import annotations

import hashlib
import json
import mmap
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from runtime.checkpoints.pack_file import _HEAD, DamagedPack, PackFile, PackWriter

PIECE = 8 << 20  # beyond which data is written in more than one piece
TENSORS = [
    (bytes(range(256)), "uint8", (4, 64)),
    (b"", "float32", (0, 3)),
    (os.urandom(PIECE + 3000), "bfloat16", (PIECE // 2 + 1500,)),
    (os.urandom(12), "float32", (3,)),
]


def write(path: Path, key: str = "key") -> Path:
    writer = PackWriter(path)
    numbers = [
        writer.add_tensor(memoryview(data), dtype, shape, len(data))
        for data, dtype, shape in TENSORS
    ]
    writer.add("all", {"tensors": numbers})
    assert "all" in writer
    assert "other" not in writer
    writer.finish(key)
    writer.close()
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> bytes:
    return write(tmp_path_factory.mktemp("pack") / "weights").read_bytes()


def rewritten(data: bytes, change) -> bytes:
    """The file with another index, whose hash and size are right again."""
    magic, at, count, _ = _HEAD.unpack(data[: _HEAD.size])
    index = json.loads(data[at : at + count])
    change(index)
    text = json.dumps(index).encode()
    head = _HEAD.pack(magic, at, len(text), hashlib.sha256(text).digest())
    return head + data[_HEAD.size : at] + text


def test_what_was_written_is_read_and_mapped(tmp_path):
    file = PackFile(write(tmp_path / "weights"), "key")
    mapped = file.map()
    assert file.entries == {"all": {"tensors": [0, 1, 2, 3]}}
    for tensor, (data, dtype, shape) in zip(file.tensors, TENSORS, strict=True):
        assert (tensor.dtype, tensor.shape, tensor.checksum) == (dtype, shape, len(data))
        assert tensor.offset % 64 == 0
        assert mapped[tensor.offset : tensor.offset + tensor.nbytes] == data
        buffer = bytearray(tensor.nbytes)
        file.read(tensor, memoryview(buffer))
        assert bytes(buffer) == data
    file.close()
    assert mapped[64:320] == TENSORS[0][0]  # what is mapped stays


def test_what_is_mapped_cannot_be_written(tmp_path):
    mapped = PackFile(write(tmp_path / "weights"), "key").map()
    with pytest.raises(TypeError):
        mapped[64] = 0


def test_a_file_that_is_cut_short_anywhere_is_none(tmp_path, written):
    path = tmp_path / "weights"
    for size in (0, 1, _HEAD.size - 1, _HEAD.size, 5000, PIECE, len(written) - 1):
        path.write_bytes(written[:size])
        with pytest.raises(DamagedPack):
            PackFile(path, "key")
    path.write_bytes(written + b"\0")
    with pytest.raises(DamagedPack, match=f"it has {len(written) + 1} bytes, and {len(written)}"):
        PackFile(path, "key")


def test_every_byte_of_head_and_index_matters(tmp_path, written):
    path = tmp_path / "weights"
    _, at, count, _ = _HEAD.unpack(written[: _HEAD.size])
    for place in (*range(_HEAD.size), *range(at, at + count, 7)):
        data = bytearray(written)
        data[place] ^= 0x10
        path.write_bytes(data)
        with pytest.raises(DamagedPack):
            PackFile(path, "key")


def test_one_that_was_never_finished_is_none(tmp_path):
    path = tmp_path / "weights"
    writer = PackWriter(path)
    writer.add_tensor(memoryview(bytes(3 * PIECE)), "uint8", (3 * PIECE,), 0)
    writer.close()
    with pytest.raises(DamagedPack, match="not written to the end"):
        PackFile(path, "key")


def test_it_is_taken_for_no_other_model(tmp_path):
    path = write(tmp_path / "weights", key="mine")
    with pytest.raises(DamagedPack, match="of another model or layout"):
        PackFile(path, "yours")


LIES: dict[str, Any] = {
    "offset-in-head": lambda t: t.__setitem__(0, 0),
    "offset-negative": lambda t: t.__setitem__(0, -64),
    "offset-unaligned": lambda t: t.__setitem__(0, t[0] + 1),
    "offset-beyond": lambda t: t.__setitem__(0, 1 << 40),
    "offset-word": lambda t: t.__setitem__(0, "64"),
    "shape-beyond": lambda t: t.__setitem__(2, [1 << 62, 4]),
    "shape-negative": lambda t: t.__setitem__(2, [-1, -64]),
    "shape-fraction": lambda t: t.__setitem__(2, [2.5]),
    "shape-true": lambda t: t.__setitem__(2, [True]),
    "shape-missing": lambda t: t.__setitem__(2, None),
    "type": lambda t: t.__setitem__(1, "object"),
    "checksum": lambda t: t.__setitem__(3, None),
    "fields": lambda t: t.pop(),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_an_index_that_lies_is_refused(lie, tmp_path, written):
    path = tmp_path / "weights"
    path.write_bytes(rewritten(written, lambda index: lie(index["tensors"][0])))
    with pytest.raises(DamagedPack, match="names what cannot be in it"):
        PackFile(path, "key")


@pytest.mark.parametrize("index", [[], {}, {"key": "key"}, {"entries": [], "tensors": []}, 7])
def test_another_json_is_no_index(index, tmp_path, written):
    path = tmp_path / "weights"
    text = json.dumps(index).encode()
    magic, at, _, _ = _HEAD.unpack(written[: _HEAD.size])
    head = _HEAD.pack(magic, at, len(text), hashlib.sha256(text).digest())
    path.write_bytes(head + written[_HEAD.size : at] + text)
    with pytest.raises(DamagedPack):
        PackFile(path, "key")


def test_what_others_may_have_written_is_refused(tmp_path):
    path = write(tmp_path / "weights")
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o620)
    with pytest.raises(DamagedPack, match="can be written by others"):
        PackFile(path, "key")
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        PackFile(tmp_path / "link", "key")


def map_and_wait(path: str, pipe: Any) -> None:
    mapped = PackFile(Path(path), "key").map()
    pipe.send(None)
    pipe.recv()
    mapped.close()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system has no /proc")
def test_two_processes_have_a_file_in_memory_once(tmp_path):
    path = write(tmp_path / "weights")
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(2):
        here, there = context.Pipe()
        process = context.Process(target=map_and_wait, args=(str(path), there))
        process.start()
        pipes.append(here)
        processes.append(process)
    for pipe in pipes:
        pipe.recv()
    for process in processes:
        kib = sizes_of(path, Path(f"/proc/{process.pid}/smaps").read_text())
        assert kib["Rss"] * 1024 >= path.stat().st_size  # all of it is there already
        assert kib["Shared_Clean"] + kib["Shared_Dirty"] == kib["Rss"]
        assert kib["Private_Clean"] + kib["Private_Dirty"] == 0
        assert kib["Pss"] <= 0.51 * kib["Rss"]
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()


def sizes_of(path: Path, smaps: str) -> dict[str, int]:
    """KiB of what is mapped of a file."""
    lines = smaps.split(str(path))[1].splitlines()[1:]
    fields = (line.split() for line in lines if line.endswith(" kB"))
    found: dict[str, int] = {}
    for name, size, _ in fields:
        found.setdefault(name.rstrip(":"), int(size))
    return found


def test_pages_that_cannot_be_read_are_told_and_kill_nothing(tmp_path):
    """The file shrinks between the look at its size and the mapping of its pages."""
    path = write(tmp_path / "weights")
    file = PackFile(path, "key")
    os.truncate(path, mmap.PAGESIZE)
    with pytest.raises((DamagedPack, ValueError)):
        file.map()
