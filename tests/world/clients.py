"""Clients with manners of their own."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import h11

from tests.world.checks import Answer, Reader

if TYPE_CHECKING:
    from collections import Counter

    from tests.world.network import Connection, Network
    from tests.world.traffic import Asked

PATIENCE_S = 600.0
SLOW_S = 3.0  # longer than this the server waits for no head, and for no body


@dataclass
class Call:
    """A request on its way.

    Attributes:
        sent_s, ended_s: its first byte; its last answer's byte or the end of the connection.
        answer: as far as it came.
        left: its client did not wait for the end.
    """

    asked: Asked
    sent_s: float = -1.0
    ended_s: float = -1.0
    answer: Answer = field(default_factory=Answer)
    left: bool = False
    hung: bool = False


@dataclass
class Manners:
    """How a client behaves. leaves: at the last request, "sending" or "reading", after so many
    bytes; how: "reset" or "close". stays: it stops reading for good, and does not leave."""

    pieces: int = 0  # bytes sent at a time; 0: all at once
    pause_s: float = 0.0  # between two pieces
    read_bytes: int = 65536
    read_pause_s: float = 0.0
    capacity: int = 1 << 20
    pipelines: bool = False
    half_closes: bool = False
    leaves: str = ""
    how: str = "reset"
    after: int = 0
    stays: bool = False
    garbage: bool = False

    @property
    def patient(self) -> bool:
        """The server has no reason to lose it."""
        return not (self.leaves or self.stays or self.garbage)


def draw_manners(rng: random.Random) -> Manners:
    manners = Manners()
    draw = rng.random()
    if draw < 0.12:
        manners.pieces, manners.pause_s = rng.choice((1, 7, 50)), 0.0005
    elif draw < 0.22:
        manners.read_bytes, manners.read_pause_s = rng.choice((20, 200)), 0.01
        manners.capacity = 400
    manners.pipelines = rng.random() < 0.2
    draw = rng.random()
    if draw < 0.3:
        manners.leaves = rng.choice(("sending", "reading", "reading"))
        manners.how = rng.choice(("reset", "close"))
        manners.after = rng.choice((0, 1, 30, 200, 700, 3000))
    elif draw < 0.38:
        manners.half_closes = True
    elif draw < 0.44:
        manners.stays, manners.capacity = True, 100
    elif draw < 0.48:
        manners.garbage = True
    return manners


class Client:
    """One connection and its requests.

    Args: counts: told of what the client does that a server must bear.
    """

    def __init__(
        self,
        network: Network,
        rng: random.Random,
        asked: list[Asked],
        counts: Counter[str],
    ) -> None:
        self.calls = [Call(one) for one in asked]
        self.manners = draw_manners(rng)
        self.refused = False
        self.problems: list[str] = []
        self.over = asyncio.Event()
        self._network = network
        self._rng = rng
        self._counts = counts
        self._reader = Reader()
        self._answered = asyncio.Event()
        self._gone = False  # this client has left
        self._connection: Connection

    async def run(self) -> None:
        try:
            self._connection = await self._network.connect(capacity=self.manners.capacity)
        except ConnectionRefusedError:
            self.refused = True
            self._collect()
            self.over.set()
            return
        reading = asyncio.create_task(self._read())
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._talk()
                if self.manners.stays:
                    self.over.set()
                    await reading
                else:
                    await self._answers(len(self.calls))
        except TimeoutError:
            for call in self.calls[len(self._reader.done) :]:
                call.hung = True
        except ConnectionError:
            await reading  # what was said before the end
        self._connection.close()
        self._gone = True
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        self._collect()
        self.over.set()

    async def _talk(self) -> None:
        last = self.calls[-1]
        for number, call in enumerate(self.calls):
            if not self.manners.pipelines:
                await self._answers(number)
            call.sent_s = self._network.loop.time()
            data = self._bytes_of(call.asked)
            self._reader.ask(call.asked.method, call.asked.path)
            if call is last:
                if self.manners.garbage:
                    self._counts["garbage"] += 1
                    data = self._rng.randbytes(40) + b"\r\n\r\n"
                if self.manners.leaves == "sending":
                    await self._send(data[: min(self.manners.after, len(data) - 1)])
                    self._leave(call)
                    return
            await self._send(data)
        if self.manners.half_closes:
            self._counts["half-closed"] += 1
            self._connection.shut_down()

    async def _send(self, data: bytes) -> None:
        size = self.manners.pieces or len(data) or 1
        if size < len(data):
            self._counts["in pieces"] += 1
        for at in range(0, len(data), size):
            await self._connection.send(data[at : at + size])
            if self.manners.pause_s:
                await asyncio.sleep(self.manners.pause_s)

    def _bytes_of(self, asked: Asked) -> bytes:
        """The request as it goes over the wire, framed in one of HTTP's ways."""
        if asked.body is None:
            return f"{asked.method} {asked.path} HTTP/1.1\r\nHost: world\r\n\r\n".encode()
        body = asked.body if isinstance(asked.body, bytes) else json.dumps(asked.body).encode()
        head = f"{asked.method} {asked.path} HTTP/1.1\r\nHost: world\r\n"
        head += "Content-Type: application/json\r\n"
        draw = self._rng.random()
        if draw < 0.1:
            body = gzip.compress(body, mtime=0)
            head += "Content-Encoding: gzip\r\n"
        if draw < 0.2:
            half = len(body) // 2
            chunks = [chunk for chunk in (body[:half], body[half:]) if chunk]
            framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
            return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + framed + b"0\r\n\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    @property
    def held_up(self) -> bool:
        """Whether the whole world was."""
        return self._counts["held up"] > 0

    def _leave(self, call: Call) -> None:
        call.left = self._gone = True
        self._counts[f"left while {self.manners.leaves}"] += 1
        if self.manners.how == "reset":
            self._connection.reset()
        else:
            self._connection.close()
        self._answered.set()

    async def _answers(self, count: int) -> None:
        """Waits for so many answers. Raises: ConnectionError: they will not come."""
        while len(self._reader.done) < count and not self._gone:
            self._answered.clear()
            await self._answered.wait()
        if self._gone:
            raise ConnectionError

    async def _read(self) -> None:
        manners = self.manners
        connection = self._connection
        got = 0
        if manners.read_pause_s:
            self._counts["slow reader"] += 1
        try:
            while True:
                if manners.stays and len(self._reader.done) == len(self.calls) - 1:
                    self._counts["never reads"] += 1
                    await connection.over.wait()
                    break
                size = manners.read_bytes
                at_last = len(self._reader.done) == len(self.calls) - 1
                if manners.leaves == "reading" and at_last:
                    size = max(1, min(size, manners.after - got))
                data = await connection.receive(size)
                self._feed(data)
                if not data:
                    break
                if manners.leaves == "reading" and at_last:
                    got += len(data)
                    if got >= manners.after and len(self._reader.done) < len(self.calls):
                        self._leave(self.calls[-1])
                        return
                if manners.read_pause_s:
                    await asyncio.sleep(manners.read_pause_s)
        except ConnectionError:
            pass
        self._gone = True
        self._answered.set()

    def _feed(self, data: bytes) -> None:
        before = len(self._reader.done)
        try:
            self._reader.feed(data)
        except h11.RemoteProtocolError as error:
            if data:
                self.problems.append(f"no HTTP: {error}")
        except AssertionError as error:
            self.problems.append(f"no HTTP: {error}")
        if len(self._reader.done) > before:
            for call in self.calls[before : len(self._reader.done)]:
                call.ended_s = self._network.loop.time()
            self._answered.set()

    def _collect(self) -> None:
        now = self._network.loop.time()
        done = self._reader.done
        for number, call in enumerate(self.calls):
            if number < len(done):
                call.answer = done[number]
            elif number == len(done):
                call.answer = self._reader.current
            if call.ended_s < 0:
                call.ended_s = now
            if call.sent_s < 0:
                call.sent_s = now
