"""NewTokenRatio: which share of the running requests' remaining output is reserved."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from runtime.request import Request

INITIAL = 0.7
FLOOR = 0.14  # of the initial ratio
DECAY_STEPS = 600
HEADROOM_TOKENS = 20  # per running request, after a retraction


class NewTokenRatio:
    """Starts cautious, decays while decoding goes well, jumps after a retraction.

    Args:
        conservativeness: scales the start; larger reserves more.
    """

    def __init__(self, conservativeness: float) -> None:
        self.initial = min(INITIAL * conservativeness, 1.0)
        self.floor = FLOOR * self.initial
        self.value = self.initial

    def decay(self) -> None:
        """A step with decode rows went by without a retraction."""
        step = (self.initial - self.floor) / DECAY_STEPS
        self.value = max(self.value - step, self.floor)

    def reset(self) -> None:
        """Nothing is left to do."""
        self.value = self.initial

    def after_retraction(self, staying: Iterable[Request]) -> None:
        """What the requests that stay have really used so far, with some headroom."""
        decoded = allowed = count = 0
        for request in staying:
            count += 1
            decoded += request.launched_tokens
            allowed += request.max_new_tokens
        estimate = min(1.0, (decoded + HEADROOM_TOKENS * count) / (allowed + 1))
        self.value = max(self.value, estimate)
