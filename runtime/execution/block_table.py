"""The block table: which pages hold a request row's tokens."""

from __future__ import annotations

import torch
from torch import Tensor


class BlockTable:
    """`pages` [R, max_pages] int32: page of (request row, position // page_size), on the device.

    It has no twin on the host: the scheduler sends each entry once, and the entries of a step are
    written in the order of the device's work, right before the step that needs them. So a row may
    be rewritten for step N + 1 while N runs. Row 0 and page 0 are reserved for padding.
    """

    def __init__(
        self, rows: int, context_length: int, page_size: int, device: torch.device
    ) -> None:
        """rows: usable ones; the table has one more."""
        self.page_size = page_size
        width = -(-context_length // page_size)
        self.pages = torch.zeros(rows + 1, width, dtype=torch.int32, device=device)

    def write(self, rows: Tensor, indices: Tensor, pages: Tensor) -> None:
        """pages[rows, indices] = pages, all [n] int32."""
        self.pages.index_put_((rows, indices), pages)

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """[T] int64: the KV slot of each (row, position). rows [T] int32, positions [T] int64."""
        pages = self.pages[rows, positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size
