"""Those who want to be told of something that the event loop does."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("loomserve.engine")

T = TypeVar("T")


class Watchers(Generic[T]):
    """Calls each watcher with every item. False where there is none."""

    def __init__(self) -> None:
        self._watchers: list[Callable[[T], None]] = []

    def __bool__(self) -> bool:
        return bool(self._watchers)

    def watch(self, watcher: Callable[[T], None]) -> Callable[[], None]:
        """Calls `watcher` with every further item, on the event loop, in the time of what is
        served: it must be quick. One that raises is called no more, and serving goes on.

        Returns: what ends it; may be called twice.
        """
        self._watchers.append(watcher)
        return lambda: self._unwatch(watcher)

    def tell(self, item: T) -> None:
        """Calls every watcher that there is when it is called; never raises."""
        for watcher in tuple(self._watchers):
            try:
                watcher(item)
            except Exception:
                log.exception("a watcher failed; it is told no more")
                self._unwatch(watcher)

    def _unwatch(self, watcher: Callable[[T], None]) -> None:
        if watcher in self._watchers:
            self._watchers.remove(watcher)
