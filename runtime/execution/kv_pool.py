"""The KV memory of the process: indexed by slot, never asked for space (the scheduler decides)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from ops.op_set import DecoderSpec


class TokenToKVPool:
    """K and V of every slot, a pair of tensors [S, HK, D] in `caches` for each layer.

    The first page is reserved: padding reads and writes it, no request owns it.
    """

    def __init__(
        self, spec: DecoderSpec, slots: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (slots, spec.num_kv_heads, spec.head_dim)
        # Zeros, not empty: what padding reads is finite. On a CPU the pages of the memory are
        # taken when first written, so a large pool costs nothing until it is used.
        self.caches: list[tuple[Tensor, ...]] = [
            tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
            for _ in range(spec.num_layers)
        ]

    def tensors(self) -> list[Tensor]:
        """All memory of the pool, each tensor's first dimension being slots."""
        return [tensor for cache in self.caches for tensor in cache]


def bytes_per_token(spec: DecoderSpec, dtype: torch.dtype) -> int:
    """KV memory of one token over all layers."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize
