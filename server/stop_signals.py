"""SIGTERM and SIGHUP before the server has handlers of its own: none of them is lost."""

from __future__ import annotations

import signal


class StopSignals:
    """Receives them from now on, SIGHUP unless it is ignored (nohup does that).

    While things are loaded each ends the process at once, by an exception. That alone is not
    enough: where it is raised in a finalizer or within a broad `except`, it goes no further.

    Attributes: received: whether there was one.
    """

    def __init__(self) -> None:
        self.received = False
        self._held = False
        signal.signal(signal.SIGTERM, self._receive)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._receive)

    def _receive(self, number: int, frame: object) -> None:
        self.received = True
        if not self._held:
            raise SystemExit(0)

    def check(self) -> None:
        """Raises: SystemExit: there was one."""
        if self.received:
            raise SystemExit(0)

    def hold(self) -> None:
        """From here on signals are only noted, for `serve` to act on.

        Raises: SystemExit: there was one.
        """
        self._held = True
        self.check()
