"""Which recurrent states the rows of a step go on from.

A row of the block table has the state slot of the same number, and padding has slot 0. Behind them
are the slots of saved states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ops.op_set import RecurrentBatch, SavedRow

if TYPE_CHECKING:
    from runtime.execution.device import Device
    from runtime.scheduling.schedule_batch import ScheduleBatch


class StateRows:
    """Makes the recurrent part of steps.

    Args:
        device: where; the host does not wait for it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    def of(self, batch: ScheduleBatch, *, decode_first: bool) -> RecurrentBatch:
        """The states of a step's rows.

        Args: decode_first: its tokens stand as in a packed step, else as in the batch.
        """
        count = batch.num_prefill if decode_first else 0
        rows, starts, lengths = (
            np.array(values[count:] + values[:count], dtype=np.int64)
            for values in (batch.rows, batch.prefix_lens, batch.extend_lens)
        )
        sources = np.array(batch.rows, dtype=np.int64)
        sources[np.array(batch.state_rows, dtype=np.int64)] = batch.state_slots
        sources = np.concatenate((sources[count:], sources[:count]))
        order = np.argsort(-lengths, kind="stable")
        first = np.cumsum(lengths) - lengths
        token_rows = np.repeat(np.arange(len(rows)), lengths)
        packed = np.concatenate((rows, sources, starts, first, lengths, order, token_rows))
        parts = self._device.upload(packed).split([len(rows)] * 6 + [len(token_rows)])
        slots, before, positions, first_tokens, counts, by_length, of_token = parts
        return RecurrentBatch(
            sources=before,
            slots=slots,
            fresh=positions == 0,
            starts=first_tokens,
            lengths=counts,
            token_rows=of_token,
            order=by_length,
            counts=tuple(lengths[order].tolist()),
            saves=_saves(batch, len(rows) - count, order),
        )


def _saves(batch: ScheduleBatch, first: int, order: np.ndarray) -> tuple[SavedRow, ...]:
    """Args: first: where the batch's first row stands in the step (modulo its rows)."""
    if not batch.save_rows:
        return ()
    places = np.argsort(order)
    rows = [(row + first) % len(order) for row in batch.save_rows]
    return tuple(
        SavedRow(row, int(places[row]), tokens, slot)
        for row, tokens, slot in zip(rows, batch.save_tokens, batch.save_slots, strict=True)
    )
