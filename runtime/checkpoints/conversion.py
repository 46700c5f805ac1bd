"""A GGUF file rewritten as a Hugging Face folder with bfloat16 weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from runtime.checkpoints.checkpoint import RawTensor, TensorInfo
from runtime.checkpoints.gguf_checkpoint import GgufCheckpoint
from runtime.checkpoints.gguf_tokenizer import write_tokenizer
from runtime.checkpoints.safetensors_file import write_safetensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray


def convert_gguf(gguf: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Writes the model in `gguf` to `folder` in Hugging Face layout, matrices and norms in
    bfloat16. Raises: ModelError: not a model this server can read."""
    progress("converting the model (once)")
    checkpoint = GgufCheckpoint(gguf)
    progress("converting: tokenizer")
    write_tokenizer(checkpoint, folder)
    infos = {name: TensorInfo(info.shape, "bfloat16") for name, info in checkpoint.tensors.items()}
    write_safetensors(folder / "model.safetensors", infos, _bfloat16_tensors(checkpoint, progress))


def _bfloat16_tensors(
    checkpoint: GgufCheckpoint, progress: Callable[[str], None]
) -> Iterator[RawTensor]:
    for index, (name, info) in enumerate(checkpoint.tensors.items()):
        progress(f"converting: {index + 1} of {len(checkpoint.tensors)} tensors")
        raw = checkpoint.read(name)
        if raw.dtype != "bfloat16":
            values = np.frombuffer(raw.buffer, np.dtype(raw.dtype))
            raw = RawTensor(info.shape, "bfloat16", to_bfloat16(values).data.cast("B"))
        yield raw


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of float32 numbers, rounded to nearest, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
