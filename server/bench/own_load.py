"""How busy the client itself is: one thread does all its work, so a client that is busy measures
itself and not the server."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 0.5  # of one look
BUSY = 0.8  # share of a core from which the client's own work shows in what it measures


@dataclass(slots=True)
class OwnLoad:
    """Processor time of this thread over wall time, looked at now and again.

    Args: wall, cpu: clocks, in seconds.
    """

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.thread_time
    shares: list[float] = field(default_factory=list)
    _begun: tuple[float, float] = field(init=False)
    _last: tuple[float, float] = field(init=False)

    def __post_init__(self) -> None:
        self._begun = self._last = self.wall(), self.cpu()

    def look(self) -> None:
        """Notes the share since the last look."""
        now = self.wall(), self.cpu()
        if now[0] > self._last[0]:
            self.shares.append((now[1] - self._last[1]) / (now[0] - self._last[0]))
        self._last = now

    async def watch(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await asyncio.sleep(SECONDS)
            self.look()

    def summary(self) -> dict[str, Any]:
        """Shares of a core over the whole and in the busiest look, and whether that is too much."""
        wall, cpu = self.wall() - self._begun[0], self.cpu() - self._begun[1]
        share = cpu / wall if wall > 0 else 0.0
        busiest = max(self.shares, default=share)
        return {
            "cpu_share": round(share, 3),
            "busiest_share": round(busiest, 3),
            "bottleneck": share > BUSY or busiest > BUSY,
        }
