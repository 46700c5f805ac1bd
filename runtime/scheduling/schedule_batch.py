"""What one step computes, as ints. Made whole by `Scheduler.plan`, never changed afterwards."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.request import Request


def ints() -> array[int]:
    """An empty array of 32-bit ints: torch and numpy read its buffer without copying."""
    return array("i")


@dataclass(slots=True, eq=False)
class ScheduleBatch:
    """One step: prefill rows first, then decode rows. All arrays are parallel to `requests`
    unless said otherwise.

    A decode row is an extend of length 1. Its input token is not here: the step that sampled it
    may not be read yet, so the device gathers it from its next-token buffer at the request's row.
    KV slots follow from the block table: the token at position p of a row is stored at
    table[row][p // page_size] * page_size + p % page_size.

    Args:
        step: number of the step, counted from 0.
        num_prefill: the first num_prefill rows are prefill rows, the others decode rows.
        rows: of the block table.
        prefix_lens: position of the first new token = tokens of the row already in the pool.
        extend_lens: new tokens; 1 for decode rows.
        input_ids: the prefill rows' new tokens, concatenated.
        sampled: batch rows (ascending) whose last position is sampled: every row but the middle
            chunks. `StepOutput.token_ids` is parallel to it.
        sample_positions: parallel to `sampled`; the number of tokens before the one sampled
            (counter of the random generator).
        output_counts: parallel to `sampled`; output tokens before the one sampled (min_tokens).
        table_rows, table_indices, table_pages: parallel to one another; entries of the block
            table to write before the step: table[row][page index] = page.
        retry: these rows were in a step that failed; they compute the same again.
        restore: requests of this step whose row a step that failed, or was taken back with it, may
            have changed on the device. Before this step is launched, what the device keeps per row
            (newest token, penalty counts) is to be set anew from `input_ids` and `output_ids`,
            which then are all tokens before this step.
    """

    step: int
    num_prefill: int = 0
    requests: list[Request] = field(default_factory=list)
    rows: array[int] = field(default_factory=ints)
    prefix_lens: array[int] = field(default_factory=ints)
    extend_lens: array[int] = field(default_factory=ints)
    input_ids: array[int] = field(default_factory=ints)
    sampled: array[int] = field(default_factory=ints)
    sample_positions: array[int] = field(default_factory=ints)
    output_counts: array[int] = field(default_factory=ints)
    table_rows: array[int] = field(default_factory=ints)
    table_indices: array[int] = field(default_factory=ints)
    table_pages: array[int] = field(default_factory=ints)
    retry: bool = False
    restore: list[Request] = field(default_factory=list)

    @property
    def num_decode(self) -> int:
        return len(self.requests) - self.num_prefill

    @property
    def prefill_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def kind(self) -> str:
        """ "prefill", "decode" or "mixed"."""
        if not self.num_prefill:
            return "decode"
        return "mixed" if self.num_decode else "prefill"
