"""What a model on disk is to the rest of the project: a config and named tensors.

`open_checkpoint` takes a Hugging Face folder or a `.gguf` file and answers with the same record,
so the code that builds a model never asks what it was read from. No torch here: a tensor is a
writable buffer that `torch.frombuffer` (or numpy) reads without a copy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from runtime.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ops.coded_weight import CodedMatrix, GroupedMatrix


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor before it is read.

    Args:
        dtype: torch's name of the type that `read` gives: "float32", "bfloat16", "float16", ...
    """

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor's values, row-major.

    Args:
        buffer: writable (but private: a write never reaches the file), so that
            `torch.frombuffer(raw.buffer, dtype=getattr(torch, raw.dtype)).view(raw.shape)` takes
            it without a copy or a warning. Pages of a mapped file are read when first touched.
        release: gives back the memory of a mapped file's pages, for whoever has copied the values;
            what was written to them is lost.
    """

    shape: tuple[int, ...]
    dtype: str
    buffer: memoryview
    release: Callable[[], None] = lambda: None


class Checkpoint(Protocol):
    """A model on disk."""

    @property
    def path(self) -> Path:
        """What the user named: a folder or a file."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """The model's `config.json` (of a GGUF file: what it would be)."""
        ...

    @property
    def generation_config(self) -> dict[str, Any]:
        """`generation_config.json`, empty where the model has none."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Hugging Face names of all tensors, in the order of the file."""
        ...

    def read(self, name: str) -> RawTensor:
        """The values of one tensor. Raises: ModelError: no such tensor, or the file is damaged."""
        ...

    def coded(self, name: str) -> CodedMatrix | GroupedMatrix | None:
        """A matrix as the integers that the file holds; None where it holds none, or in an order
        that has no place in memory. `read` gives the same numbers as floats.

        Raises: ModelError: no such tensor."""
        ...


def is_gguf(path: Path) -> bool:
    """Whether the model at `path` is a `.gguf` file rather than a Hugging Face folder.

    Raises: ModelError: it is neither; names what was looked for.
    """
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path}: has no config.json, so it is no Hugging Face model folder")
        return False
    if not path.exists():
        hint = ""
        hub_id = re.fullmatch(
            r"(?:(?:https?|hf):/+(?:huggingface\.co/)?)?([\w.-]+/[\w.-]+)", str(path)
        )
        if hub_id:
            hint = (
                ". If it is a model of the Hugging Face hub, fetch it first (hf download"
                f" {hub_id[1]} --local-dir FOLDER) and name the folder"
            )
        raise ModelError(f"{path}: no such folder or file{hint}")
    if path.suffix != ".gguf":
        raise ModelError(f"{path}: neither a folder nor a .gguf file")
    return True


def tensor_info(checkpoint: Checkpoint, name: str) -> TensorInfo:
    """Shape and type of a tensor. Raises: ModelError: the checkpoint has none of that name."""
    info = checkpoint.tensors.get(name)
    if info is None:
        raise ModelError(f"{checkpoint.path}: has no tensor {name!r}")
    return info
