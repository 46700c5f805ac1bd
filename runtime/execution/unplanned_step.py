"""Steps that no scheduler planned: what warm-up, measurements and tests run."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from runtime.scheduling.schedule_batch import ScheduleBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.request import Request


def unplanned_step(
    requests: Sequence[Request],
    rows: Sequence[int],
    prefix_lens: Sequence[int],
    prompt: Sequence[int],
) -> ScheduleBatch:
    """A step of one piece of a prompt and of decode rows behind it, all of them sampled. Whatever
    it reads and writes is where the block table says already.

    Args:
        requests: one a row, the prompt's first.
        rows, prefix_lens: parallel to them, see `ScheduleBatch`.
        prompt: the piece's tokens.
    """
    count = len(requests)
    extend_lens = array("i", [len(prompt), *[1] * (count - 1)])
    return ScheduleBatch(
        step=0,
        num_prefill=1,
        requests=list(requests),
        rows=array("i", rows),
        prefix_lens=array("i", prefix_lens),
        extend_lens=extend_lens,
        input_ids=array("i", prompt),
        sampled=array("i", range(count)),
        sample_positions=array("i", map(sum, zip(prefix_lens, extend_lens, strict=True))),
        output_counts=array("i", [0] * count),
    )
