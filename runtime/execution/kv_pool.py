"""The KV memory of the process: indexed by slot, never asked for space (the scheduler decides)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from ops.decoder import DecoderModel


class KVPool:
    """What each block keeps of the tokens in every slot.

    The first page is reserved: padding reads and writes it, no request owns it.

    Args:
        caches: for each block of the model its tensors, [S, ...] each: K and V of an attention,
            none of an MLP.
    """

    def __init__(
        self, model: DecoderModel, slots: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        # Zeros, not empty: what padding reads is finite. On a CPU the pages of the memory are
        # taken when first written, so a large pool costs nothing until it is used.
        self.caches: list[tuple[Tensor, ...]] = [
            tuple(
                torch.zeros((slots, *shape), device=device, dtype=dtype)
                for shape in block.mixer.cache_shapes
            )
            for block in model.blocks
        ]

    def tensors(self) -> list[Tensor]:
        """All memory of the pool."""
        return [tensor for cache in self.caches for tensor in cache]


def bytes_per_token(model: DecoderModel, dtype: torch.dtype) -> int:
    """Memory of one token over all blocks."""
    shapes = [shape for block in model.blocks for shape in block.mixer.cache_shapes]
    return sum(math.prod(shape) for shape in shapes) * dtype.itemsize
