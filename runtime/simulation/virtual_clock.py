"""A clock that costs nothing to wait on."""

from __future__ import annotations


class VirtualClock:
    """Seconds since an arbitrary start; moves only when it is told to, and never back."""

    __slots__ = ("now",)

    def __init__(self, start_s: float = 0.0) -> None:
        self.now = start_s

    def advance_to(self, time_s: float) -> None:
        """Jumps to the time of the next event.

        Raises: ValueError: the event lies in the past, so events were taken out of order."""
        if time_s < self.now:
            raise ValueError(f"cannot go back from {self.now} s to {time_s} s")
        self.now = time_s
