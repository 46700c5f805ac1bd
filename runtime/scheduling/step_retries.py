"""StepRetries: a failed step's rows are tried again by halves, until the guilty one is alone.

One row that a step cannot compute must not end the others. So a step that fails is taken back, and
its rows are launched again as two steps, one after the other, as they were: the same tokens at the
same positions. A half that fails is halved again. With k rows of which one is guilty that takes
about 2 log2(k) steps, and nobody else loses anything but that time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.request import Request
    from runtime.scheduling.lifecycle import InFlight
    from runtime.scheduling.prefill_adder import Admitted
    from runtime.scheduling.schedule_batch import ScheduleBatch


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a failed step that are launched again together."""

    prefills: list[Admitted] = field(default_factory=list)
    decodes: list[Request] = field(default_factory=list)


class StepRetries:
    """The parts that are still to be launched, and whose rows the device may have changed."""

    def __init__(self) -> None:
        self._parts: list[Part] = []  # the next one last
        self._touched: set[Request] = set()

    def touched(self, flights: Sequence[InFlight]) -> None:
        """Steps were taken back after the device may have run them, in part or whole."""
        for flight in flights:
            self._touched.update(flight.batch.requests)

    def add(self, failed: InFlight) -> None:
        """The rows of a failed step are to be tried again, before what is left of others. Where
        some have ended, nobody knows yet whether the others can be computed together."""
        starts = {item.request: replace(item, match=None) for item in failed.prefills}
        rows = [request for request in failed.batch.requests if not failed.gave_up(request)]
        half = (len(rows) + 1) // 2 if len(rows) == len(failed.batch.requests) else len(rows)
        for part in (rows[half:], rows[:half]):
            prefills = [starts[request] for request in part if request in starts]
            decodes = [request for request in part if request not in starts]
            self._parts.append(Part(prefills, decodes))

    def take(self) -> Part | None:
        """The next part, without those that have ended meanwhile; None: nothing is left."""
        while self._parts:
            part = self._parts.pop()
            prefills = [item for item in part.prefills if _goes_on(item.request)]
            decodes = [request for request in part.decodes if _goes_on(request)]
            if prefills or decodes:
                return Part(prefills, decodes)
        return None

    def note_restored(self, batch: ScheduleBatch) -> None:
        """Names in a step that is about to be launched whose rows must be restored before."""
        if self._touched:
            batch.restore = [request for request in batch.requests if request in self._touched]
            self._touched.difference_update(batch.restore)
            self._touched = {r for r in self._touched if r.finish is None and r.row >= 0}


def _goes_on(request: Request) -> bool:
    """Whether a row that waits for its turn is still there: it may have ended, or be back in the
    queue."""
    return request.finish is None and request.row >= 0
