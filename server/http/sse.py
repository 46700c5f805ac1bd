"""Server-sent events: bytes of events, and the response that carries them."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import web

DONE = b"data: [DONE]\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Proxies that buffer answers would hold every event back.
    "X-Accel-Buffering": "no",
}

# Where no more than this is unsent, a connection takes more without waiting: transports ask for a
# pause at 64 KiB, and for more again at a quarter of that.
ROOM_BYTES = 16384


class SlowReader(ConnectionError):
    """The client has left its answer unread for too long."""


def event(data: Any, name: str | None = None) -> bytes:
    """One event whose data is a JSON object; a name for protocols that use them."""
    head = b"data: " if name is None else b"event: " + name.encode() + b"\ndata: "
    return head + orjson.dumps(data) + b"\n\n"


class EventStream:
    """A response of events. Until its headers have gone out, by `open` or with the first event,
    whatever fails is still answered with a status of its own.

    Args: timeout_s: how long a client may leave events unread.
    Attributes:
        started: the headers have gone out.
        sent_s: when something was last sent, on the loop's clock.
    """

    def __init__(self, request: web.Request, timeout_s: float) -> None:
        self._request = request
        self._timeout_s = timeout_s
        self._time = asyncio.get_running_loop().time
        self._opening = asyncio.Lock()
        self._transport: asyncio.Transport | None = None  # while more may be written
        self._chunked = False
        self.started = False
        self.sent_s = self._time()
        self.response = web.StreamResponse(headers=HEADERS)

    @property
    def unread(self) -> bool:
        """Something waits for the client, or nothing can be sent."""
        transport = self._transport
        return transport is None or transport.get_write_buffer_size() > 0

    async def open(self) -> None:
        """Sends the headers, where that is not done.

        Raises: ConnectionError: the client has gone.
        """
        async with self._opening:
            if self.started:
                return
            await self.response.prepare(self._request)
            self.started = True
            self.sent_s = self._time()
            self._chunked = self.response.headers.get("Transfer-Encoding") == "chunked"
            self._transport = self._request.transport

    async def send(self, data: bytes) -> None:
        """Writes events; waits only while the client's buffer is full.

        Raises: SlowReader: it stayed full. ConnectionError: the client has gone.
        """
        if not data or self._sent_at_once(data):
            return
        if not self.started:
            await self.open()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.response.write(data)
        except TimeoutError:
            self._drop()
            raise SlowReader(f"nothing was read for {self._timeout_s:g} s") from None
        self.sent_s = self._time()

    def _sent_at_once(self, data: bytes) -> bool:
        """Sends events where the headers have gone out and that cannot wait for the client. The way
        through the response, and a timer for it, cost more than all else that is done for a
        token."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        if transport.get_write_buffer_size() + len(data) > ROOM_BYTES:
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        self.sent_s = self._time()
        return True

    async def end(self) -> web.StreamResponse:
        """Ends the answer, whose headers have gone out. Returns it, for the handler to return."""
        self._transport = None
        await self.response.write_eof()
        return self.response

    def _drop(self) -> None:
        """Closes the connection at once: what is buffered will never be read."""
        transport = self._request.transport
        if transport is not None:
            transport.abort()
