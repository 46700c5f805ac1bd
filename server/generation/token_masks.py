"""Which tokens the rows of a step may sample: grammars and bad words, as bit masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from runtime.runner import SampleMasks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from runtime.request import Request
    from runtime.scheduling.schedule_batch import ScheduleBatch
    from server.generation.sequence import Sequence


def needs_mask(batch: ScheduleBatch) -> bool:
    """Whether any sampled row of the step is constrained."""
    requests = batch.requests
    return any(
        requests[row].grammar is not None or requests[row].sampling.bad_words
        for row in batch.sampled
    )


def token_masks(
    batch: ScheduleBatch, live: Mapping[str, Sequence], vocab_size: int
) -> SampleMasks | None:
    """Masks of the step's constrained rows; None where there are none.

    Rows whose request has ended meanwhile are left free: their token is dropped.
    """
    rows: list[int] = []
    for index, row in enumerate(batch.sampled):
        request = batch.requests[row]
        sequence = live.get(request.request_id)
        if sequence is not None and sequence.masked:
            rows.append(index)
    if not rows:
        return None
    bits = np.full((len(rows), (vocab_size + 31) // 32), -1, dtype=np.int32)
    for index, row_bits in zip(rows, bits, strict=True):
        request = batch.requests[batch.sampled[index]]
        if request.grammar is not None:
            live[request.request_id].fill_mask(row_bits)
        if request.sampling.bad_words:
            ban_bad_words(row_bits, request)
    return SampleMasks(rows=rows, bits=bits)


def ban_bad_words(bits: NDArray[np.int32], request: Request) -> None:
    """Clears the tokens that would complete a bad word after the request's output.

    Where that would leave no token, the bans are dropped: a grammar that leaves one way only wins.
    """
    output = request.output_ids
    words = bits.view(np.uint32)
    kept = words.copy()
    for word in request.sampling.bad_words:
        head, token = word[:-1], word[-1]
        if not head or tuple(output[-len(head) :]) == head:
            kept[token // 32] &= np.uint32(~(1 << (token % 32)) & 0xFFFFFFFF)
    if kept.any():
        words[:] = kept
