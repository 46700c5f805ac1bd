"""The tier below the pool, under the virtual clock: one copy or load at a time, loads first."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.scheduling.kv_tier import PageLoad
    from runtime.scheduling.plan import Plan
    from runtime.scheduling.write_behind import PageCopy


@dataclass(frozen=True, slots=True)
class TierTimes:
    """How long copies and loads take. Args: start_s: each; page_s: of a page, in addition."""

    start_s: float = 0.0
    page_s: float = 0.0


class SimulatedTier:
    """Performs what plans name."""

    def __init__(self, times: TierTimes) -> None:
        self._times = times
        self._copies: deque[PageCopy] = deque()
        self._loads: deque[PageLoad] = deque()
        self._doing: PageCopy | PageLoad | None = None
        self.end_s: float | None = None  # when what is being done is done; None: nothing is

    def begin(self, plan: Plan, now: float) -> None:
        """Takes over what a pass has named."""
        self._copies.extend(plan.copies)
        self._loads.extend(plan.loads)
        if self.end_s is None:
            self._next(now)

    def take_done(self) -> PageCopy | PageLoad:
        """What was done at `end_s`; begins the next."""
        done, now = self._doing, self.end_s
        assert done is not None
        assert now is not None
        self._next(now)
        return done

    def _next(self, now: float) -> None:
        waiting = self._loads or self._copies
        self._doing, self.end_s = None, None
        if waiting:
            self._doing = waiting.popleft()
            pages = len(self._doing.pages)
            self.end_s = now + self._times.start_s + self._times.page_s * pages
