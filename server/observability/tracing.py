"""What is traced, and where to: a file for as long as the server runs, or an answer for some steps.

While a trace is written, the engine notes how long text takes; otherwise nothing is done for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, BinaryIO

from runtime.errors import ConfigError, QueueFull
from runtime.private_files import open_private
from server.generation.step_records import StepRecord
from server.observability.request_report import RequestReport, report_of
from server.observability.trace_events import Event, TraceEvents, left_out, lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from server.generation.generator import Generator
    from server.generation.watchers import Watchers

    Item = StepRecord | RequestReport

log = logging.getLogger("loomserve.trace")

MAX_CAPTURES = 4
# Of an answer: requests that end meanwhile, beside the steps that were asked for.
MAX_REQUESTS = 10_000
# Of a file: what waits for the disk, and its size, beyond which no viewer opens it.
MAX_WAITING = 10_000
MAX_BYTES = 2**30
WRITE_SECONDS = 0.1
CLOSE_SECONDS = 5.0


class Tracing:
    """Traces of a server. Args: reports: of requests whose answers are over."""

    def __init__(self, generator: Generator, reports: Watchers[RequestReport]) -> None:
        self._generator = generator
        self._engine = generator.engine
        self._reports = reports
        self._traced = 0
        self._captures = 0
        self._file: TraceFile | None = None

    def watch(self, watcher: Callable[[Item], None]) -> Callable[[], None]:
        """Calls `watcher` with every step and request that ends. Returns: what ends it."""
        ends = [self._engine.watch_steps(watcher), self._reports.watch(watcher)]
        self._traced += 1
        self._engine.delivery.timed = True

        def end() -> None:
            if ends:
                self._traced -= 1
                self._engine.delivery.timed = self._traced > 0
            while ends:
                ends.pop()()

        return end

    def write_to(self, path: str) -> None:
        """Traces to a file from now on. Raises: ConfigError: it cannot be written."""
        self._file = TraceFile(path, self.watch)

    async def capture(self, steps: int, seconds: float) -> bytes:
        """A trace of the next steps, or of those that come within a time.

        Raises: QueueFull: others trace already.
        """
        if self._captures >= MAX_CAPTURES:
            raise QueueFull(f"{MAX_CAPTURES} traces are being taken already", retry_after_s=seconds)
        found: list[Item] = []
        enough = asyncio.Event()
        left: dict[type[Item], int] = {StepRecord: steps, RequestReport: MAX_REQUESTS}

        def take(item: Item) -> None:
            if left[type(item)]:
                left[type(item)] -= 1
                found.append(item)
            if not left[StepRecord]:
                enough.set()

        self._captures += 1
        end = self.watch(take)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await enough.wait()
        finally:
            end()
            self._captures -= 1
        return await asyncio.to_thread(_whole, [*found, *self._going_on()])

    def _going_on(self) -> list[RequestReport]:
        now = self._engine.clock()
        return [report_of(one, ended_s=now) for one in self._generator.live]

    def close(self) -> None:
        """Ends the file, with what has not ended."""
        if self._file is not None:
            self._file.close(self._going_on())


def _whole(items: Iterable[Item]) -> bytes:
    events = TraceEvents()
    body = lines(events.begin())
    body += b"".join(lines(_events(events, item)) for item in items)
    body += lines(events.end())
    return b"[\n" + body.removesuffix(b",\n") + b"\n]\n"


def _events(events: TraceEvents, item: Item) -> Iterable[Event]:
    return events.request(item) if isinstance(item, RequestReport) else events.step(item)


class TraceFile:
    """A file that a thread writes, and its owner alone can read. It is an array whose last bracket
    comes when it is closed; viewers take it without one, too, so that of a server which died.

    The event loop only leaves records for the thread, which takes them ten times a second. Where
    the disk is full the trace ends, with a warning; where it is slow, something is left out.

    Raises: ConfigError: the file cannot be written at all.
    """

    def __init__(
        self, path: str, watch: Callable[[Callable[[Item], None]], Callable[[], None]]
    ) -> None:
        self._path = path
        self._events = TraceEvents()
        self._waiting: deque[Item] = deque()
        self._left_out = 0
        self._closing = threading.Event()
        self._ended = False
        self._bytes = 0
        self._file = _opened(path)
        try:
            self._write(b"[\n" + lines(self._events.begin()))
        except OSError as error:
            self._file.close()
            raise _unwritable(path, error) from error
        self._thread = threading.Thread(target=self._work, name="trace", daemon=True)
        self._thread.start()
        self._stop = watch(self._take)

    def _take(self, item: Item) -> None:
        """On the event loop."""
        if self._ended:
            self._stop()
        elif len(self._waiting) < MAX_WAITING:
            self._waiting.append(item)
        else:
            if not self._left_out:
                log.warning("trace %s: the disk is slow, something is left out", self._path)
            self._left_out += 1

    def _work(self) -> None:
        try:
            while not self._closing.wait(WRITE_SECONDS):
                self._write_waiting()
            self._write_waiting()
            self._write(lines(self._events.end()))
            self._write(left_out(self._left_out) + b"\n]\n")
        except Exception as error:
            log.warning("trace %s: ends here, since it cannot be written: %s", self._path, error)
        finally:
            self._ended = True
            with contextlib.suppress(OSError):
                self._file.close()

    def _write_waiting(self) -> None:
        """What has come until now."""
        items = [self._waiting.popleft() for _ in range(len(self._waiting))]
        self._write(b"".join(lines(_events(self._events, item)) for item in items))
        if self._bytes > MAX_BYTES:
            raise OSError(f"it has {MAX_BYTES} bytes")

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self._bytes += len(data)

    def close(self, going_on: Iterable[RequestReport]) -> None:
        """Writes what is left, as far as the disk takes it in time. Idempotent."""
        self._stop()
        if not self._closing.is_set():
            self._waiting.extend(going_on)
            self._closing.set()
            self._thread.join(CLOSE_SECONDS)


def _opened(path: str) -> BinaryIO:
    try:
        return open(path, "wb", buffering=0, opener=open_private)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: str, error: OSError) -> ConfigError:
    return ConfigError(f"trace {path}: cannot be written: {error}")
