"""Moves whole pages of the KV pool to host memory and back, beside the steps.

On a GPU by a stream of its own and page-locked memory: the steps' stream waits for nothing here,
and the host waits in the thread that calls. On a CPU the same calls copy at once. What keeps this
right is the scheduler's: it names pages that are written already, drops what left the cache
meanwhile, and loads into pages that nobody else has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from runtime.execution.device import Device
    from runtime.execution.kv_pool import KVPool


class PageMover:
    """A `runtime.offload.page_store.MovesPages`. For one thread at a time.

    A page's bytes are those of all tensors of the pool for its slots, tensor by tensor.

    Args:
        page_size: slots of a page.
    """

    def __init__(self, device: Device, pool: KVPool, page_size: int) -> None:
        self._device = device
        raw = [
            tensor.view(torch.uint8).view(len(tensor) // page_size, -1) for tensor in pool.tensors()
        ]
        self._widths = [part.shape[1] for part in raw]
        # Whatever stands in them, as words where that goes: a fourth of the time on a CPU.
        words = all(width % 8 == 0 for width in self._widths)
        self._word = torch.int64 if words else torch.uint8
        self._pools = [part.view(self._word) for part in raw]
        self._stream = device.stream()
        self.page_bytes = sum(self._widths)

    def read(self, pages: Sequence[int]) -> np.ndarray:
        """The KV of these pages, [n, page_bytes] uint8 in host memory, once it is there."""
        device = self._device
        out = np.empty((len(pages), self.page_bytes), dtype=np.uint8)
        with torch.inference_mode(), device.on(self._stream):
            host = self.queue_reads(device.upload(np.array(pages, dtype=np.int64)))
            fence = device.fence()
            fence.record()
        fence.synchronize()
        first = 0
        for part, width in zip(host, self._widths, strict=True):
            out[:, first : first + width] = part.view(torch.uint8).numpy()
            first += width
        return out

    def queue_reads(self, index: Tensor) -> list[Tensor]:
        """Starts the copies to the host: of each tensor of the pool what the pages have there.

        Args: index: [n] int64, the pages.
        """
        return [self._device.to_host(pool.index_select(0, index)) for pool in self._pools]

    def write(self, pages: Sequence[int], kv: np.ndarray) -> None:
        """Sets these pages, and returns once it is done. Args: kv: as `read` gives it."""
        device = self._device
        parts = []
        first = 0
        for width in self._widths:
            parts.append(np.ascontiguousarray(kv[:, first : first + width]))
            first += width
        with torch.inference_mode(), device.on(self._stream):
            index = device.upload(np.array(pages, dtype=np.int64))
            self.queue_writes(index, [device.upload(part) for part in parts])
            fence = device.fence()
            fence.record()
        fence.synchronize()

    def queue_writes(self, index: Tensor, parts: Sequence[Tensor]) -> None:
        """Starts the copies into the pool. Args: parts: [n, width] uint8, on the device."""
        for pool, part in zip(self._pools, parts, strict=True):
            pool.index_copy_(0, index, part.view(self._word))
