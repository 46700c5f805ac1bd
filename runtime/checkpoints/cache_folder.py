"""Folders in the cache that are made once: whole or not at all, by one process at a time.

A folder is built under a temporary name beside its final one, synced, then renamed, all under a
file lock. So a reader that sees the final name sees a complete folder, two processes that start
together build once, and what a killed process left is swept by the next builder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def build_once(
    target: Path, build: Callable[[Path], None], progress: Callable[[str], None]
) -> Path:
    """`target`, made by `build(temporary folder)` if it is not there yet.

    Args: progress: told when another process is waited for.
    Raises: ConfigError: the cache folder cannot be written; what `build` raises.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{target.name}.lock", progress):
            if not target.is_dir():
                _build(target, build)
    except OSError as error:
        raise ConfigError(
            f"cache folder {target.parent}: {error.strerror or error}; --cache-dir or"
            " $LOOMSERVE_CACHE names another folder"
        ) from error
    return target


def _build(target: Path, build: Callable[[Path], None]) -> None:
    prefix = f".{target.name}.partial-"
    for leftover in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover)
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        build(temporary)
        temporary.chmod(0o755)
        for path in (*temporary.rglob("*"), temporary):
            _sync(path)
        temporary.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(path: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """An exclusive lock that ends with the process, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is preparing the same files; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
