"""What a stream of events does by the clock: its headers go out soon, and it is never silent for
long, so that no client or proxy takes a long wait for a broken connection."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from server.http.sse import EventStream

log = logging.getLogger("loomserve.http")

# The headers wait so long at most for what may still be refused with a status of its own.
OPEN_AFTER_S = 0.05


@asynccontextmanager
async def heartbeat(
    out: EventStream, every_s: float, beat: Callable[[], bytes]
) -> AsyncIterator[None]:
    """Keeps a stream alive while it is written, until it is to be ended.

    Args:
        every_s: nothing was sent for so long: `beat` is; 0: never, and nothing is opened either.
        beat: makes whole events.
    """
    if not every_s:
        yield
        return
    beating = asyncio.create_task(_beats(out, every_s, beat))
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


async def _beats(out: EventStream, every_s: float, beat: Callable[[], bytes]) -> None:
    now = asyncio.get_running_loop().time
    try:
        await asyncio.sleep(OPEN_AFTER_S)
        await out.open()
        while True:
            left = out.sent_s + every_s - now()
            if left <= 0:
                if not out.unread:  # else there is something on its way
                    await out.send(beat())
                left = every_s
            await asyncio.sleep(left)
    except ConnectionError:
        return  # who writes the stream finds out, too
    except Exception:
        log.exception("a stream is not kept alive; it goes on")
