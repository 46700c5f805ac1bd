"""What the bodies of requests hold in memory: counted, and bounded in all."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from runtime.errors import QueueFull

if TYPE_CHECKING:
    from collections.abc import Iterator

RETRY_AFTER_S = 1.0
# Bodies of the largest size that may be there at once: that is a room for all, not for each of
# thousands of connections. Those of up to SMALL bytes, which nearly all are, need no room in it.
LARGEST_AT_ONCE = 64
SMALL = 65_536


class Bodies:
    """Bodies that arrive, and those of requests that are being answered.

    Args: largest: bytes of one.
    Attributes: bytes: of all; most: that the larger ones may have together.
    """

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.most = LARGEST_AT_ONCE * largest
        self.bytes = 0
        self._of_large = 0

    @contextmanager
    def held(self, told: int | None) -> Iterator[None]:
        """Counts a body as long as the block runs.

        Args: told: its length, as the request's head has it; None: it comes in chunks, so that it
            may be as large as any.
        Raises: QueueFull: there is no room for another one as large.
        """
        size = self.largest if told is None else min(told, self.largest)
        large = size if size > SMALL else 0
        if self._of_large + large > self.most:
            raise QueueFull(
                f"request bodies of {self._of_large} bytes are held, and at most {self.most} may"
                " be; retry later",
                retry_after_s=RETRY_AFTER_S,
            )
        self.bytes += size
        self._of_large += large
        try:
            yield
        finally:
            self.bytes -= size
            self._of_large -= large
