"""Where the config and the tokenizer of a model are, whatever form its weights have."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from runtime.checkpoints.cache_folder import build_once
from runtime.checkpoints.checkpoint import is_gguf

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Grows when what is written changes, so that a folder of an older server is not taken for its own.
_FORM = 4


def model_folder(path: Path, cache_dir: Path, progress: Callable[[str], None]) -> Path:
    """A Hugging Face folder with the config and tokenizer files of the model at `path`.

    A folder is its own; a `.gguf` file's files are written once into the cache, without weights.
    The weights are read from `path` either way (`open_checkpoint`).

    Raises: ModelError: not a model. ConfigError: the cache folder cannot be written.
    """
    if not is_gguf(path):
        return path

    def build(folder: Path) -> None:
        # Imported here so that a start from a folder does not pay for numpy and gguf.
        from runtime.checkpoints.gguf_checkpoint import GgufCheckpoint
        from runtime.checkpoints.gguf_tokenizer import write_tokenizer

        progress(f"reading the tokenizer of {path.name}")
        write_tokenizer(GgufCheckpoint(path), folder)

    state = path.stat()
    identity = f"{path.resolve()}:{state.st_size}:{state.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return build_once(cache_dir / f"tokenizer-{path.stem}-{digest}-{_FORM}", build, progress)
