"""A graph's behaviour on any device, not its speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_WARM_UPS = 2


class EagerRecorder:
    """A `GraphRecorder` that runs the step anew each time, into the output of the first.

    For tests, and for finding out whether a fault is a graph's.
    """

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        for _ in range(_WARM_UPS):
            output = step()

        def replay() -> Tensor:
            return output.copy_(step())

        return replay
