"""A fingerprint of a model's weights, for what was computed with them and is kept beyond them."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SAMPLES = 64  # of each file, and what is read of each
_SAMPLE_BYTES = 16 << 10
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def weights_fingerprint(path: Path) -> bytes:
    """32 bytes that differ where the weights do, or their config.

    Args: path: a folder or a .gguf file.

    Names, sizes and times of change of all files, and pieces of each from end to end: to read all
    of large weights would take as long as to load them. A file that is touched counts as changed;
    the time that the system keeps of that (ctime) cannot be set back.
    """
    digest = hashlib.sha256()
    for file in _files(path):
        state = file.stat()
        digest.update(
            f"{file.name}:{state.st_size}:{state.st_mtime_ns}:{state.st_ctime_ns};".encode()
        )
        with file.open("rb") as opened:
            for at in range(_SAMPLES):
                opened.seek(max(state.st_size - _SAMPLE_BYTES, 0) * at // (_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.digest()


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        found = (file for file in path.iterdir() if file.suffix in (".safetensors", ".json"))
        yield from sorted(file for file in found if file.is_file())
    elif _PART.search(path.name):
        first = _PART.sub("", path.name)
        yield from sorted(f for f in path.parent.iterdir() if _PART.sub("", f.name) == first)
    else:
        yield path
