"""Work on many rows that lets others run in between, where it takes long."""

from __future__ import annotations

import asyncio
import time

SECONDS = 0.005


class Pace:
    """How long the event loop has been held."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def due(self) -> bool:
        """Before each row: whether to rest."""
        return time.perf_counter() - self._since > SECONDS

    async def rest(self) -> None:
        """Lets others run."""
        await asyncio.sleep(0)
        self._since = time.perf_counter()
