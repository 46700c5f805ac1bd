"""Which recurrent states the rows of a step go on from.

A row of the block table has the state slot of the same number, and padding has slot 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ops.op_set import RecurrentBatch

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
        order = np.argsort(-lengths, kind="stable")
        first = np.cumsum(lengths) - lengths
        token_rows = np.repeat(np.arange(len(rows)), lengths)
        packed = np.concatenate((rows, starts, first, lengths, order, token_rows))
        parts = self._device.upload(packed).split([len(rows)] * 5 + [len(token_rows)])
        slots, positions, first_tokens, counts, by_length, of_token = parts
        return RecurrentBatch(
            sources=slots,
            slots=slots,
            fresh=positions == 0,
            starts=first_tokens,
            lengths=counts,
            token_rows=of_token,
            order=by_length,
            counts=tuple(lengths[order].tolist()),
        )
