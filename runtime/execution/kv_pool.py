"""What steps leave to one another on the device: the KV pool, the block table that says which of it
is whose, and the newest tokens. Indexed, never asked for space: the scheduler decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ops.blocks.block import RecurrentMixer
from ops.kv_codes import LARGEST, scale_shapes
from runtime.execution.device import zeros
from runtime.scheduling.page_allocator import pages_for

if TYPE_CHECKING:
    from ops.blocks.block import Block
    from ops.decoder import DecoderModel
    from runtime.execution.long_prompt_rows import LongPromptRows
    from runtime.execution.state_rows import StateRows


Parts = list[tuple[tuple[int, ...], torch.dtype]]  # of what is kept: shape and type of each tensor


class KVPool:
    """What each block keeps of the tokens in every slot, and of the rows in every state slot.

    The first page and the first state slot are reserved: padding reads and writes them, no request
    owns them.

    Args:
        slots: of tokens. states: of rows.
        caches: for each block of the model its tensors, [S, ...] each: K and V of an attention,
            none of an MLP; behind pools of codes (`ops.kv_codes`) their scales, in float32. Of a
            recurrent block: its states, [states, ...] each, in float32.
    """

    def __init__(
        self,
        model: DecoderModel,
        slots: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        states: int = 0,
    ) -> None:
        # Zeros, not empty: what padding reads is finite. A large pool costs nothing on a CPU until
        # it is used.
        def make(count: int, kept: Parts) -> tuple[Tensor, ...]:
            made = [zeros((count, *shape), device=device, dtype=kind) for shape, kind in kept]
            return tuple(made)

        by_token = [make(slots, _of_a_token(block, dtype)) for block in model.blocks]
        by_row = [make(states, _of_a_row(block)) for block in model.blocks]
        self.caches: list[tuple[Tensor, ...]] = [
            a + b for a, b in zip(by_token, by_row, strict=True)
        ]
        self._by_token = by_token

    def tensors(self) -> list[Tensor]:
        """All memory of the slots of tokens."""
        return [tensor for cache in self._by_token for tensor in cache]


def bytes_per_token(model: DecoderModel, dtype: torch.dtype) -> int:
    """Memory of one token over all blocks, scales included."""
    return sum(_bytes(_of_a_token(block, dtype)) for block in model.blocks)


def bytes_per_state(model: DecoderModel) -> int:
    """Memory of one row's recurrent state over all blocks; 0: the model has none."""
    return sum(_bytes(_of_a_row(block)) for block in model.blocks)


def _bytes(kept: Parts) -> int:
    return sum(math.prod(shape) * kind.itemsize for shape, kind in kept)


def _of_a_row(block: Block) -> Parts:
    """Shape and type of each tensor that a block keeps of a row."""
    mixer = block.mixer
    shapes = mixer.state_shapes if isinstance(mixer, RecurrentMixer) else ()
    return [(shape, torch.float32) for shape in shapes]


def _of_a_token(block: Block, dtype: torch.dtype) -> Parts:
    """Shape and type of each tensor that a block keeps of a token."""
    shapes = block.mixer.cache_shapes
    scales = scale_shapes(shapes) if dtype in LARGEST else ()
    return [(shape, dtype) for shape in shapes] + [(shape, torch.float32) for shape in scales]


def block_table_bytes(rows: int, context_length: int, page_size: int) -> int:
    """Memory of a `BlockTable`."""
    return (rows + 1) * pages_for(context_length, page_size) * torch.int32.itemsize


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
        width = pages_for(context_length, page_size)
        self.pages = torch.zeros(rows + 1, width, dtype=torch.int32, device=device)

    def write(self, rows: Tensor, indices: Tensor, pages: Tensor) -> None:
        """pages[rows, indices] = pages, all [n] int32."""
        self.pages.index_put_((rows, indices), pages)

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """[T] int64: the KV slot of each (row, position). rows [T] int32, positions [T] int64."""
        pages = self.pages[rows, positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What steps leave to one another on the device, for the life of a runner.

    Args:
        next_tokens: [R] int64, the newest token of each request row: the sampler writes it, the
            next step's decode rows read it, and the host waits for neither.
        long_prompts: None where every token's row of the rotary tables is its position.
        states: None where the model is not recurrent.
    """

    block_table: BlockTable
    pool: KVPool
    next_tokens: Tensor
    long_prompts: LongPromptRows | None = None
    states: StateRows | None = None
