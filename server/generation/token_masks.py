"""Which tokens the rows of a step may sample: grammars and bad words, as bit masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.runner import SampleMasks
from server.generation.pace import Pace
from server.grammars.bits import all_allowed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from runtime.scheduling.schedule_batch import ScheduleBatch
    from server.generation.output import ChoiceOutput


def needs_mask(batch: ScheduleBatch, live: Mapping[str, ChoiceOutput]) -> bool:
    """Whether any sampled row of the step is constrained."""
    return bool(_constrained(batch, live))


async def token_masks(
    batch: ScheduleBatch,
    live: Mapping[str, ChoiceOutput],
    vocab_size: int,
    fail: Callable[[ChoiceOutput, Exception], None],
) -> SampleMasks | None:
    """Masks of the step's constrained rows; None where there are none.

    Rows whose request has ended meanwhile are left free: their token is dropped. Others may run
    between two rows.

    Args: fail: told of a request whose mask cannot be made; its row is left free as well.
    """
    rows = _constrained(batch, live)
    if not rows:
        return None
    bits = all_allowed(len(rows), vocab_size)
    pace = Pace()
    for row_bits, choice in zip(bits, rows.values(), strict=True):
        if pace.due():
            await pace.rest()
        if live.get(choice.request.request_id) is not choice:
            continue
        try:
            choice.fill_mask(row_bits)
        except Exception as error:
            row_bits.fill(-1)
            fail(choice, error)
    return SampleMasks(rows=list(rows), bits=bits)


def _constrained(batch: ScheduleBatch, live: Mapping[str, ChoiceOutput]) -> dict[int, ChoiceOutput]:
    """The choices that need a mask, by their index into `batch.sampled`."""
    found: dict[int, ChoiceOutput] = {}
    for index, row in enumerate(batch.sampled):
        choice = live.get(batch.requests[row].request_id)
        if choice is not None and choice.masked:
            found[index] = choice
    return found
