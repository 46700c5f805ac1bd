"""Grammars that do what a test wants of them."""

from __future__ import annotations

from runtime.errors import LoomserveError


class Scripted:
    """Allows everything and is ready. changes: what other methods do instead."""

    def __init__(self, **changes) -> None:
        self.ready = True
        self.refused = None
        self.failed: LoomserveError | None = None
        self.closed = False
        for name, function in changes.items():
            setattr(self, name, function.__get__(self))

    def start(self, when_known) -> None:
        """There is nothing to compile."""

    def close(self) -> None:
        self.closed = True

    def fill_mask(self, bits) -> None:
        """The row allows everything already."""

    def accept(self, token_id) -> None:
        """Any token will do."""

    def is_terminated(self) -> bool:
        return False
