"""Threads for work whose time grows with the size of what a client sent.

The event loop serves everybody, so what may take longer than the way to a thread and back does not
run on it. Each thread has its range of sizes: what waits, waits for
work of its own range, so a chat never waits for somebody's whole library.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# Characters or bytes; tokenizing takes 0.3 to 1.4 us for each. The way to a thread takes 0.3 ms.
INLINE = 2048
_UP_TO = (65_536, 1_048_576)  # the last thread takes what is longer


class Lanes:
    """A thread for each order of size. Args: name: of the threads."""

    def __init__(self, name: str) -> None:
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"{name}-{number}")
            for number in range(len(_UP_TO) + 1)
        ]

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """What `work` gives, done beside the event loop unless it is short."""
        if size <= INLINE:
            return work()
        lane = self._threads[sum(size > bound for bound in _UP_TO)]
        return await asyncio.get_running_loop().run_in_executor(lane, work)

    def close(self) -> None:
        """Ends the threads; what has not begun is dropped."""
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)
