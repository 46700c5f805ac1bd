"""Packed weights kept in a file of the cache folder: packed once, mapped by every later start.

What a file holds follows from the checkpoint, from the type and quantization that were asked for,
from the layout of panels, and from the code that reads and packs. All of that is in its key, so a
file is never taken for another one's; damage is found by checksums, and packed anew. Processes that
start together pack once. Files that were used longest ago go, so that all take no more than an
option says.

A mapped file is in memory once for all processes that serve it. Where the system keeps it on small
pages, a step would be slower than it need be (`ops/cpu/README.md`): there each process takes a copy
on large ones, unless it is told to share.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import logging
import os
import shutil
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ops.cpu.packed_parts import NoParts
from runtime.checkpoints.cache_folder import build_once
from runtime.checkpoints.fingerprint import weights_fingerprint
from runtime.checkpoints.pack_file import DamagedPack, PackFile, PackWriter, on_large_pages
from runtime.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ops.cpu.packed_parts import PackedParts
    from ops.decoder import DecoderModel
    from runtime.checkpoints.pack_file import PackedTensor
    from runtime.config import RunnerConfig
    from runtime.execution.device import Device
    from runtime.execution.weights import WeightLoader

log = logging.getLogger("loomserve.weights")

FOLDER = "packed"  # in the cache folder
LEAST_WEIGHTS = 1 << 24  # of a model that is worth a file: it packs in less time than one is read
_FILE = "weights"
_DAY_S = 86400.0
_LEFT_FREE = 1 << 30  # of the disk, for others
_ROOT = Path(__file__).resolve().parents[2]
# Of these follows what is read and packed of a checkpoint.
_SOURCES = ("runtime/models", "runtime/checkpoints", "runtime/execution/weights.py", "ops/cpu")


class PackedWeights:
    """The file of a checkpoint's weights as a device has them."""

    def __init__(
        self, config: RunnerConfig, device: Device, path: Path, progress: Callable[[str], None]
    ) -> None:
        """path: of the checkpoint."""
        self._config = config
        self._device = device
        self._path = path
        self._progress = progress

    def load(self, make_loader: Callable[[], WeightLoader], sampled_ids: int) -> DecoderModel:
        """The model, from the file where there is one, or can be made.

        Args: make_loader: a loader serves once. sampled_ids: see `WeightLoader.load`.
        Raises: ModelError: see there.
        """
        parts, weights = self._device.parts, make_loader().weights
        if parts is None or not self._config.packed_cache_gb or weights < LEAST_WEIGHTS:
            return make_loader().load(sampled_ids)
        key = self._key(parts, sampled_ids)
        target = (
            self._config.cache_folder
            / FOLDER
            / f"{self._path.name.removesuffix('.gguf')}-{key[:16]}"
        )
        file = target / _FILE
        share = self._config.share_weights
        try:
            kept = _read(file, key, parts, share)
            if kept is None:
                make_room(target, self._bytes(weights), self._config.packed_cache_gb * 2**30)
                build_once(
                    target,
                    lambda folder: _write(folder / _FILE, key, parts, make_loader(), sampled_ids),
                    self._progress,
                )
                kept = _read(file, key, parts, share)
        except NoParts:
            kept = None
        except (ConfigError, OSError) as error:
            log.warning("weights are packed at every start: %s", error)
            kept = None
        return make_loader().load(sampled_ids, kept)

    def _key(self, parts: PackedParts, sampled_ids: int) -> str:
        device = self._device
        form = device.quantization, device.keeps_codes, device.keeps_floats
        what = (parts.library.name, str(device.dtype), *form, sampled_ids, code_digest())
        digest = hashlib.sha256(weights_fingerprint(self._path))
        digest.update(repr(what).encode())
        return digest.hexdigest()

    def _bytes(self, weights: int) -> int:
        """At most, of a file of so many weights."""
        if self._device.keeps_codes:  # some tensors of a file may be floats
            return int(weights * 1.25)
        a_weight = {None: self._device.dtype.itemsize, "int8": 1.25}
        return int(weights * a_weight.get(self._device.quantization, 1.0))


@functools.cache
def code_digest() -> str:
    """A digest of the sources that decide what is read of a checkpoint and how it is packed."""
    digest = hashlib.sha256(importlib.metadata.version("gguf").encode())
    for name in _SOURCES:
        path = _ROOT / name
        for source in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(source.read_bytes())
    return digest.hexdigest()


def make_room(target: Path, needed: int, most: float) -> None:
    """Removes folders beside `target`, those used longest ago first, until all together with the
    one to be made take no more than `most` bytes, and what killed processes left long ago.

    Raises: ConfigError: it does not fit, or the disk has no room for it. OSError.
    """
    if needed > most:
        raise ConfigError(
            f"packed_cache_gb {most / 2**30:g}: packed they take up to {needed / 2**30:.1f} GiB"
        )
    parent = target.parent
    parent.mkdir(parents=True, exist_ok=True)
    if target.exists():  # it could not be used
        shutil.rmtree(target)
    folders = [folder for folder in parent.iterdir() if folder.is_dir()]
    found = sorted((folder.stat().st_mtime, folder, _size(folder)) for folder in folders)
    total = needed + sum(size for _, _, size in found)
    for used, folder, size in found:
        partial = folder.name.startswith(".")
        if (partial and time.time() - used > _DAY_S) or (not partial and total > most):
            shutil.rmtree(folder)
            (parent / f".{folder.name}.lock").unlink(missing_ok=True)
            total -= size
    free = shutil.disk_usage(parent).free
    if needed + _LEFT_FREE > free:
        raise ConfigError(f"{parent}: {free / 2**30:.1f} GiB are free on the disk")


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _write(
    path: Path, key: str, parts: PackedParts, loader: WeightLoader, sampled_ids: int
) -> None:
    writer = PackWriter(path)

    def keep(name: str, value: Any) -> None:
        if name in writer:
            return
        description, tensors = parts.take_apart(value)
        numbers = [_add(writer, tensor.contiguous(), parts) for tensor in tensors]
        writer.add(name, {"value": description, "tensors": numbers})

    try:
        loader.pack(sampled_ids, keep)
        writer.finish(key)
    finally:
        writer.close()


def _add(writer: PackWriter, tensor: Tensor, parts: PackedParts) -> int:
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tensor.shape
    return writer.add_tensor(_bytes_of(tensor), dtype, shape, parts.checksum(tensor))


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _read(path: Path, key: str, parts: PackedParts, share: bool) -> dict[str, Any] | None:
    """What stands in a file, by name; None: there is none that can be used."""
    try:
        file = PackFile(path, key)
    except FileNotFoundError:
        return None
    except DamagedPack as error:
        log.warning("%s: %s; weights are packed anew", path, error)
        return None
    try:
        tensors = _tensors(file, parts, share)
        kept = {
            name: parts.put_together(entry["value"], [tensors[i] for i in entry["tensors"]])
            for name, entry in file.entries.items()
        }
        os.utime(path.parent)  # it is used
    except (DamagedPack, ValueError, TypeError, KeyError, IndexError) as error:
        log.warning("%s: %s; weights are packed anew", path, error)
        return None
    finally:
        file.close()
    return kept


def _tensors(file: PackFile, parts: PackedParts, share: bool) -> list[Tensor]:
    """All tensors of a file, mapped or copied, looked through.

    Raises: DamagedPack: one is not what was written. OSError: it cannot be read.
    """
    whole = _mapped(file)
    if share or on_large_pages(whole.data_ptr(), file.size) or not _memory_has_large_pages():
        tensors = [
            _as(whole[tensor.offset : tensor.offset + tensor.nbytes], tensor)
            for tensor in file.tensors
        ]
    else:
        del whole
        tensors = [_as(_copied(file, tensor, parts), tensor) for tensor in file.tensors]
    for tensor, found in zip(file.tensors, tensors, strict=True):
        if parts.checksum(found) != tensor.checksum:
            raise DamagedPack("it is damaged")
    return tensors


def _mapped(file: PackFile) -> Tensor:
    """[size] uint8, which must not be written to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of that it cannot be written to
        return torch.frombuffer(file.map(), dtype=torch.uint8)


def _copied(file: PackFile, tensor: PackedTensor, parts: PackedParts) -> Tensor:
    copied = parts.memory(tensor.nbytes)
    file.read(tensor, _bytes_of(copied))
    return copied


def _as(data: Tensor, tensor: PackedTensor) -> Tensor:
    return data.view(getattr(torch, tensor.dtype)).view(tensor.shape)


def _memory_has_large_pages() -> bool:
    """Whether a copy would lie on them."""
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False
