"""Threads for work whose time grows with the size of what a client sent.

The event loop serves everybody, so what may take longer than the way to a thread and back does not
run on it. Each lane has its range of sizes, so a chat never waits for somebody's whole library. In
a lane clients take turns, and none has all of its threads: who has one text to be tokenized finds a
thread free, whatever another client has sent. What they then share is the processor.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# Characters or bytes; tokenizing takes 0.3 to 1.4 us for each. The way to a thread takes 0.3 ms.
INLINE = 2048
_UP_TO = (65_536, 1_048_576)  # the last lane takes what is longer
THREADS = 3  # of a lane; one client has at most all but one


class Lanes:
    """A lane for each order of size. Args: name: of the threads."""

    def __init__(self, name: str) -> None:
        self._lanes = [_Lane(f"{name}-{number}") for number in range(len(_UP_TO) + 1)]

    async def run(self, size: int, work: Callable[[], T], client: str = "") -> T:
        """What `work` gives, done beside the event loop unless it is short. client: for whom."""
        if size <= INLINE:
            return work()
        return await self._lanes[sum(size > bound for bound in _UP_TO)].run(work, client)

    def close(self) -> None:
        """Ends the threads; what has not begun is dropped."""
        for lane in self._lanes:
            lane.close()


class _Lane:
    """Threads for work of like size. Its fields change on the event loop alone."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix=name)
        self._running: Counter[str] = Counter()  # by client
        # Who waits for a thread; clients in the order of their turns.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, work: Callable[[], T], client: str) -> T:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._begin()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end(client)
            raise
        begun = self._pool.submit(work)

        def ended(_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._end, client)

        begun.add_done_callback(ended)  # not when this is cancelled: the thread works on
        return await asyncio.wrap_future(begun)

    def _begin(self) -> None:
        """Gives free threads to those whose turn it is."""
        while self._running.total() < THREADS:
            client = next((one for one in self._waiting if self._running[one] < THREADS - 1), None)
            if client is None:
                return
            turn = self._waiting[client].popleft()
            if self._waiting[client]:
                self._waiting.move_to_end(client)
            else:
                del self._waiting[client]
            if not turn.done():  # cancelled
                self._running[client] += 1
                turn.set_result(None)

    def _end(self, client: str) -> None:
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        self._begin()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
