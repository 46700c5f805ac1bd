"""Opens a model, whatever its form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.checkpoints.checkpoint import is_gguf
from runtime.checkpoints.gguf_checkpoint import GgufCheckpoint
from runtime.checkpoints.hugging_face import HuggingFaceCheckpoint
from runtime.checkpoints.quantized.dequantized import dequantized

if TYPE_CHECKING:
    from pathlib import Path

    from runtime.checkpoints.checkpoint import Checkpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """The model at `path`: a Hugging Face folder or a `.gguf` file.

    Raises: ModelError: not a model, or damaged.
    """
    return GgufCheckpoint(path) if is_gguf(path) else dequantized(HuggingFaceCheckpoint(path))
