"""An event loop whose time is virtual and whose order is the same in every run of a seed.

Nothing waits: where no callback is ready, time jumps to the next timer. What the server does in
threads is done on the loop instead, at moments that the seed draws, as few at a time as the thread
pool has threads.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import random

    from tests.world.network import Network

T = TypeVar("T")

# What takes longer than this, in virtual time, will never end.
LAST_SECOND = 3600.0


class Hang(AssertionError):
    """Somebody waits for what never comes."""


class _Jumps(selectors.BaseSelector):
    """A selector of no files: to wait is to move the clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or self.now > LAST_SECOND:
            raise Hang(f"at {self.now:.3f} s nothing more is to come")
        self.now += max(0.0, timeout)
        return []

    # asyncio registers the pipe by which other threads wake it; there are none.

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, -1, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, -1, 0, None)

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        raise KeyError(fileobj)

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return {}


class WorldLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop on a virtual clock. Args: rng: draws how long threads take."""

    network: Network  # given by the world that is served on this loop

    def __init__(self, rng: random.Random) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)
        self.rng = rng
        self.signals: dict[int, Callable[[], object]] = {}
        self.broken: list[str] = []  # what the loop was told of and nobody handled
        self._threads = WorldThreads(4, loop=self)
        self.set_exception_handler(self._note)

    def time(self) -> float:
        return self._jumps.now

    def stall(self, seconds: float) -> None:
        """The process is held up: time goes on, and nobody does anything."""
        self._jumps.now += seconds

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.broken.append(f"{context['message']}: {error!r}")

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> Any:
        return super().run_in_executor(executor or self._threads, func, *args)

    def add_signal_handler(  # type: ignore[override]
        self, sig: int, callback: Any, *args: Any
    ) -> None:
        self.signals[sig] = lambda: callback(*args)

    async def create_server(self, protocol_factory: Any, *args: Any, **options: Any) -> Any:
        return self.network.listen(protocol_factory)

    @property
    def timers(self) -> list[str]:
        """What is still to be called later."""
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        return [repr(handle) for handle in scheduled if not handle.cancelled()]

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine, after which the loop is closed."""
        try:
            return self.run_until_complete(main)
        finally:
            self.run_until_complete(self.shutdown_asyncgens())
            self.close()


class WorldThreads(Executor):
    """A thread pool whose work is done on the loop: begun in order, ended after a drawn time.

    Args: max_workers: jobs that go on at once. loop: None takes the one that runs at `submit`.
    """

    def __init__(
        self,
        max_workers: int | None = None,
        thread_name_prefix: str = "",
        *,
        loop: WorldLoop | None = None,
    ) -> None:
        self._free = max_workers or 4
        self._loop = loop
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.closed = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        if self.closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        loop = self._loop or asyncio.get_running_loop()
        assert isinstance(loop, WorldLoop)
        self._loop = loop
        future: Future[T] = Future()
        self._queue.append((future, lambda: fn(*args, **kwargs)))
        self._begin(loop)
        return future

    def _begin(self, loop: WorldLoop) -> None:
        while self._free and self._queue:
            future, work = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                self._free -= 1
                seconds = loop.rng.choice((0.0, 0.0003, 0.002, 0.03))
                loop.call_later(seconds, self._end, loop, future, work)

    def _end(self, loop: WorldLoop, future: Future[Any], work: Callable[[], Any]) -> None:
        self._free += 1
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        self._begin(loop)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.closed = True
        while cancel_futures and self._queue:
            self._queue.popleft()[0].cancel()
