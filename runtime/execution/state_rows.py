"""Which recurrent states the rows of a step go on from.

A row of the block table has the state slot of the same number, and padding has slot 0. Behind them
are the slots of saved states.
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
        sources = np.array(batch.rows, dtype=np.int64)
        sources[np.array(batch.state_rows, dtype=np.int64)] = batch.state_slots
        sources = np.where(starts == 0, -1, np.concatenate((sources[count:], sources[:count])))
        places = np.arange(len(rows) + 1)
        saving = (np.array(batch.save_rows, dtype=np.int64) - count) % len(rows)
        stopping = np.concatenate((saving, places[:-1]))
        tokens = np.concatenate((np.array(batch.save_tokens, dtype=np.int64), lengths))
        slots = np.concatenate((np.array(batch.save_slots, dtype=np.int64), rows))
        order = np.lexsort((tokens, stopping))  # of equal ones, the row's own slot is last
        packed = (
            sources,
            np.concatenate(([0], np.cumsum(lengths))),
            np.searchsorted(stopping[order], places),
            tokens[order],
            slots[order],
        )
        sources_of, starts_of, stops, stop_tokens, stop_slots = self._device.upload(
            np.concatenate(packed)
        ).split([len(part) for part in packed])
        crossing = not set(batch.save_slots).isdisjoint(batch.state_slots)
        return RecurrentBatch(sources_of, starts_of, stops, stop_tokens, stop_slots, crossing)
