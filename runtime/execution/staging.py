"""Moves a step's int arrays to the device: packed into one buffer, one copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from runtime.execution.device import Device


class Staging:
    """Host memory for the arrays of the steps in flight.

    At most two steps are in flight, so there are two sets. A set is written again only when the
    copies of the step that used it last are done; its views belong to that step until then.
    """

    def __init__(self, device: Device, capacity: int = 4096) -> None:
        self._device = device
        self._buffers = [self._allocate(capacity) for _ in range(2)]
        self._fences = [device.fence() for _ in range(2)]
        self._next = 0

    def _allocate(self, capacity: int) -> Tensor:
        return torch.empty(capacity, dtype=torch.int32, pin_memory=self._device.pinned)

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """int32 device tensors with the values of 1-D int arrays, in the same order."""
        sizes = [len(array) for array in arrays]
        total = sum(sizes)
        which = self._next
        self._next = 1 - which
        self._fences[which].synchronize()
        if self._buffers[which].shape[0] < total:
            self._buffers[which] = self._allocate(2 * total)
        host = self._buffers[which][:total]
        np.concatenate(arrays, out=host.numpy(), casting="same_kind")
        on_device = host.to(self._device.torch_device, non_blocking=True)
        self._fences[which].record()
        return list(on_device.split(sizes))
