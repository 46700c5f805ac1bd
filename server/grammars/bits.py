"""Token masks as bits: bit t % 32 of word t // 32 allows token t."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def all_allowed(rows: int, vocab_size: int) -> NDArray[np.int32]:
    """[rows, ceil(vocab_size / 32)] int32 that allow every token."""
    return np.full((rows, (vocab_size + 31) // 32), -1, dtype=np.int32)


def forbid(bits: NDArray[np.int32], token_ids: NDArray[np.int64]) -> None:
    """Clears tokens in one row, unless that would leave none: then it stays as it is."""
    kept = bits.view(np.uint32).copy()
    masks = (1 << (token_ids & 31)).astype(np.uint32)
    np.bitwise_and.at(kept, token_ids >> 5, ~masks)
    if kept.any():
        bits[:] = kept.view(np.int32)


def allow_only(bits: NDArray[np.int32], token_id: int) -> None:
    """Sets the bit of one token and clears all others. Args: bits: one row."""
    bits.fill(0)
    bits.view(np.uint32)[token_id // 32] = 1 << token_id % 32
