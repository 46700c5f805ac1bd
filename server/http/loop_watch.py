"""How late the event loop is, and what made it late.

A beat of the loop tells how late it came, and how much processor time the loop's thread has used
since the last one: where only the former is large, others held the interpreter or the machine was
busy. A thread beside the loop looks, when a beat is overdue, at what the loop's thread is doing.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import FrameType

    from aiohttp import web

log = logging.getLogger("loomserve.loop")

BEAT_SECONDS = 0.02
# Between two beats of a loop that has next to nothing to do: waking it is then all that it costs.
QUIET_BEAT_SECONDS = 0.05
QUIET_CPU_SECONDS = 0.001
# Somebody who reads a stream sees such a gap.
TOLD_SECONDS = 0.1
_FRAMES = 6


class LoopWatch:
    """Watches the running event loop.

    Args: beat: told at each beat how late it is, and of how much processor time the loop's thread
        has used since the last one; both in seconds.
    """

    def __init__(self, beat: Callable[[float, float], None]) -> None:
        self._beat = beat
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._due = self._last = time.monotonic()
        self._used = time.thread_time()
        self._seen: tuple[float, str] | None = None  # a beat, and what has made the next one late
        self._timer = self._loop.call_later(BEAT_SECONDS, self._on_beat)
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="loop-watch", daemon=True)
        self._watcher.start()
        self._due += BEAT_SECONDS

    def close(self) -> None:
        """Ends the watch."""
        self._timer.cancel()
        self._ended.set()
        self._watcher.join()

    def _on_beat(self) -> None:
        now, used = time.monotonic(), time.thread_time()
        late = max(0.0, now - self._due)
        self._beat(late, used - self._used)
        if late > TOLD_SECONDS:
            seen, what = self._seen or (0.0, "")
            where = what if seen == self._last else "it was over before it could be looked at"
            log.warning("the event loop was held up for %.0f ms: %s", 1e3 * late, where)
        quiet = used - self._used < QUIET_CPU_SECONDS
        pause = QUIET_BEAT_SECONDS if quiet else BEAT_SECONDS
        self._last, self._used, self._due = now, used, now + pause
        self._timer = self._loop.call_later(pause, self._on_beat)

    def _watch(self) -> None:
        wait = TOLD_SECONDS
        while not self._ended.wait(wait):
            last = self._last
            wait = self._due + TOLD_SECONDS - time.monotonic()
            if wait > 0:
                continue
            wait = TOLD_SECONDS / 2
            if self._seen is None or self._seen[0] != last:
                frame = sys._current_frames().get(self._thread_id)
                task = asyncio.current_task(self._loop)
                name = "no task" if task is None else task.get_name()
                self._seen = (last, f"{name}, at {_where(frame)}")


def _where(frame: FrameType | None) -> str:
    """The innermost functions of a stack, inner ones first."""
    found: list[str] = []
    while frame is not None and len(found) < _FRAMES:
        code = frame.f_code
        file = "/".join(code.co_filename.rsplit("/", 2)[-2:])
        found.append(f"{code.co_qualname} ({file}:{frame.f_lineno})")
        frame = frame.f_back
    return " < ".join(found)


def watched(
    beat: Callable[[float, float], None],
) -> Callable[[web.Application], AsyncIterator[None]]:
    """Watches the loop as long as an application runs."""

    async def context(_: web.Application) -> AsyncIterator[None]:
        watch = LoopWatch(beat)
        yield
        watch.close()

    return context
