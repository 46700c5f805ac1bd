"""A quantized checkpoint as one of float weights, whose values are those that its layout spells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.checkpoints.checkpoint import Checkpoint, RawTensor, TensorInfo
from runtime.checkpoints.quantized.bitsandbytes import find_bitsandbytes
from runtime.checkpoints.quantized.compressed_tensors import find_compressed
from runtime.checkpoints.quantized.fp8 import find_fp8
from runtime.checkpoints.quantized.gptq import find_awq, find_gptq
from runtime.checkpoints.quantized.mxfp4 import find_mxfp4
from runtime.checkpoints.quantized.stored import Reader, Settings
from runtime.errors import ModelError, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ops.coded_weight import GroupedMatrix
    from runtime.checkpoints.quantized.stored import StoredWeight

_METHODS: dict[str, Callable[[Reader, Settings], dict[str, StoredWeight]]] = {
    "gptq": find_gptq,
    "awq": find_awq,
    "compressed-tensors": find_compressed,
    "fp8": find_fp8,
    "mxfp4": find_mxfp4,
    "bitsandbytes": find_bitsandbytes,
}


class DequantizedCheckpoint:
    """See the module's docstring. A weight is dequantized to float32 when it is read."""

    def __init__(self, inner: Checkpoint, stored: Mapping[str, StoredWeight]) -> None:
        self.path: Path = inner.path
        self.config: dict[str, Any] = inner.config
        self.generation_config: dict[str, Any] = inner.generation_config
        self._inner = inner
        self._stored = stored
        parts = {part for weight in stored.values() for part in weight.parts}
        self.tensors = {name: info for name, info in inner.tensors.items() if name not in parts}
        self.tensors |= {
            name: TensorInfo(weight.shape, "float32") for name, weight in stored.items()
        }

    def read(self, name: str) -> RawTensor:
        """See `Checkpoint.read`; a copy of what was dequantized."""
        weight = self._stored.get(name)
        if weight is None:
            return self._inner.read(name)
        values = np.ascontiguousarray(weight.values(), np.float32)
        return RawTensor(weight.shape, "float32", values.data.cast("B"))

    def coded(self, name: str) -> GroupedMatrix | None:
        """See `Checkpoint.coded`."""
        return self._stored[name].codes() if name in self._stored else None


def dequantized(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint itself where its config names no quantization.

    Raises: ModelError: one of a kind that is not known here, or its tensors do not fit it.
    """
    given = checkpoint.config.get("quantization_config")
    if given is None:
        return checkpoint
    method = given.get("quant_method") if isinstance(given, dict) else None
    if not isinstance(method, str) or method not in _METHODS:
        raise ModelError(
            f"{checkpoint.path}: config.json: quantization_config: quant_method is"
            f" {shown(method)}; it must be one of {', '.join(_METHODS)}"
        )
    try:
        stored = _METHODS[method](Reader(checkpoint), Settings(given))
    except ModelError as error:
        at = str(checkpoint.path)
        raise error if str(error).startswith(at) else ModelError(f"{at}: {error}") from None
    return DequantizedCheckpoint(checkpoint, stored)
