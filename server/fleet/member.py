"""A process of the fleet: started, signalled, drained, and started again after a while."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from server.console import progress

if TYPE_CHECKING:
    from collections.abc import Sequence

FIRST_DELAY_S, LAST_DELAY_S = 1.0, 30.0  # before a process that ended is started again
STABLE_S = 60.0  # who has run for so long begins with the first delay again

_LIBRARY = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _begin(cores: frozenset[int]) -> None:
    """Run by a new process: it gets SIGTERM should the fleet be killed, and frees its port."""
    _LIBRARY.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if cores:
        os.sched_setaffinity(0, cores)


class Member:
    """A process of the fleet. It has a group of its own, so that Ctrl-C reaches the fleet alone."""

    stdout: int | None = None  # the fleet's own

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: dict[str, str],
        cores: frozenset[int] = frozenset(),
    ) -> None:
        """cores: those that it may run on; empty: all that the fleet may."""
        self.name = name
        self.process: asyncio.subprocess.Process | None = None
        self.asked_to_end = False
        self._command = command
        self._environment = environment
        self._cores = cores

    async def start(self) -> asyncio.subprocess.Process:
        """Starts the process; the one before it has ended."""
        self.asked_to_end = False
        self.process = await asyncio.create_subprocess_exec(
            *self._command,
            env=self._environment,
            stdout=self.stdout,
            start_new_session=True,
            preexec_fn=partial(_begin, self._cores) if sys.platform == "linux" else None,
        )
        return self.process

    def signal(self, number: int) -> None:
        """Sends it a signal, if it runs."""
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def end(self, patience_s: float) -> None:
        """Lets it drain; by force where that takes too long."""
        self.asked_to_end = True
        if self.process is None:
            return
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(patience_s):
                await self.process.wait()
        except TimeoutError:
            progress(f"{self.name} did not end in {patience_s:g} s and is killed")
            self.signal(signal.SIGKILL)
            await self.process.wait()


class RestartDelay:
    """How long one waits who starts a process again: twice as long after each short life."""

    def __init__(self) -> None:
        self._delay_s = FIRST_DELAY_S
        self._started = 0.0

    def begin(self) -> None:
        """The process is started now."""
        self._started = time.monotonic()

    async def wait(self, name: str, status: int) -> None:
        """It has ended with a status: tells so, and returns when it may be started again."""
        if time.monotonic() - self._started > STABLE_S:
            self._delay_s = FIRST_DELAY_S
        progress(f"{name} ended with status {status}; again in {self._delay_s:g} s")
        await asyncio.sleep(self._delay_s)
        self._delay_s = min(2 * self._delay_s, LAST_DELAY_S)
