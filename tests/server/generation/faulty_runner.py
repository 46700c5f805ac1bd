"""A simulated runner whose steps can fail, and whose tokens tell whether anything was left behind.

Like a device it keeps the newest token and the counts of each row between steps, changes them while
it samples, and knows nothing of committed tokens but those of rows that a step begins or restores.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from runtime.runner import StepOutput
from runtime.simulation.sim_runner import SimRunner
from tests.fakes import VOCAB_SIZE

PARTS = ("launch", "forward", "sample", "result")


class FaultyRunner(SimRunner):
    """Args: fails: (step's batch, one of PARTS) to whether the step fails there."""

    def __init__(self, fails, **options) -> None:
        super().__init__(vocab_size=VOCAB_SIZE, **options)
        self.fails = fails
        self.failures = 0
        self._newest: dict[int, int] = {}
        self._counts: dict[int, Counter[int]] = {}

    def launch(self, batch):
        self._maybe_fail(batch, "launch")
        return super().launch(batch)

    def run(self, batch, masks):
        for request in batch.restore:
            self._take_over(request, request.row)
        self._maybe_fail(batch, "forward")
        output = StepOutput([])
        half = len(batch.sampled) // 2
        output.token_ids += [self._sample(batch, i, masks) for i in range(half)]
        self._maybe_fail(batch, "sample")  # some rows are changed, others are not
        output.token_ids += [self._sample(batch, i, masks) for i in range(half, len(batch.sampled))]
        self._maybe_fail(batch, "result")
        return output

    def _sample(self, batch, i, masks):
        row = batch.sampled[i]
        request, place = batch.requests[row], batch.rows[row]
        if row < batch.num_prefill:
            self._take_over(request, place)
        counts = self._counts[place]
        counted = sum((token + 1) * count for token, count in counts.items())
        seed = request.sampling.seed or 0
        token = self._newest[place] * 31 + batch.sample_positions[i] * 7 + counted * 5 + seed
        token = _allowed(masks, i, token % 251)
        self._newest[place] = token
        counts[token] += 1
        return token

    def _take_over(self, request, place):
        """Sets a row to what its request has been given."""
        self._newest[place] = [*request.input_ids, *request.output_ids][-1]
        self._counts[place] = Counter(request.output_ids)

    def _maybe_fail(self, batch, part):
        if self.fails(batch, part):
            self.failures += 1
            raise RuntimeError(f"secret detail of the {part}")


def _allowed(masks, i, token):
    """The token, or the next one that the row's mask allows."""
    if masks is None or i not in masks.rows:
        return token
    bits = np.unpackbits(masks.bits[masks.rows.index(i)].view(np.uint8), bitorder="little")
    return next(t % 251 for t in range(token, token + 251) if bits[t % 251])
