"""The rows of the rotary tables for a step with tokens of long prompts, see runtime/rope_layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from runtime.execution.device import Device
    from runtime.models.rope import RopeSpec
    from runtime.rope_layout import LongPrompts, RopeLayout
    from runtime.scheduling.schedule_batch import ScheduleBatch


class LongPromptRows:
    """Which rows a step's tokens take.

    Args:
        tables: the model's rotary embeddings with their tables.
    """

    def __init__(
        self,
        long_prompts: LongPrompts,
        layout: RopeLayout,
        tables: Sequence[tuple[RopeSpec, Tensor]],
        device: Device,
    ) -> None:
        self.long_prompts = long_prompts
        self._layout = layout
        self._tables = tables
        self._device = device

    def any_in(self, batch: ScheduleBatch) -> bool:
        """Whether some of a step's prompts are long."""
        prompts = batch.requests[: batch.num_prefill]
        return any(len(request.input_ids) > self.long_prompts.above for request in prompts)

    def rows(
        self, batch: ScheduleBatch, positions: np.ndarray, lengths: np.ndarray
    ) -> Tensor | None:
        """[T] int64 on the device; None where every token's row is its position.

        Args: positions: [T] of the step's tokens. lengths: new tokens of each batch row.
        """
        if not self.any_in(batch):
            return None
        count, above = batch.num_prefill, self.long_prompts.above
        prompts = np.array([len(request.input_ids) for request in batch.requests[:count]], np.int64)
        of_token = np.repeat(prompts, lengths[:count])
        rows = positions.astype(np.int64)
        # What is generated, and prefilled again after a retraction, stands behind the prompt.
        at = rows[: len(of_token)]
        long = np.flatnonzero((of_token > above) & (at < of_token))
        if self.long_prompts.by_length:
            self._write(at[long], of_token[long])
            rows[long] = self._layout.context + np.arange(len(long))
        else:
            rows[long[at[long] < above]] += self._layout.context
        return self._device.upload(rows)

    def _write(self, positions: np.ndarray, lengths: np.ndarray) -> None:
        """Computes the rows of these tokens; steps that read the last ones were queued before."""
        count, first = len(positions), self._layout.context
        if count > self._layout.step_tokens:
            raise ValueError(
                f"{count} tokens of long prompts in a step: at most {self._layout.step_tokens}"
            )
        for spec, table in self._tables:
            made = spec.rows(torch.from_numpy(positions), torch.from_numpy(lengths))
            table[first : first + count].copy_(self._device.upload(made.numpy()))
