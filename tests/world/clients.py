"""Clients with manners of their own, and what may be said of each answer that they got."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import h11

from server.api.admin import HEALTH_GENERATE_SECONDS
from tests.world.checks import Answer, Reader, Said, read_stream, read_whole

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


@dataclass
class Excuses:
    """What, beside the request itself, may have changed an answer.

    Args:
        drained_s, dead_s: since when the server drains, or its engine is dead.
        aborts: (from, to, name or None for all) of every order to abort.
        struck: prompts whose row was alone in a step that failed: that is taken for their fault.
    """

    drained_s: float = float("inf")
    dead_s: float = float("inf")
    queue_bound: bool = False
    time_bound: bool = False
    aborts: list[tuple[float, float, str | None]] = field(default_factory=list)
    struck: set[tuple[int, ...]] = field(default_factory=set)

    def of(self, call: Call) -> set[str]:
        found = set()
        if call.ended_s >= self.drained_s:
            found.add("drain")
        if call.ended_s >= self.dead_s:
            found.add("dead")
        if self.queue_bound:
            found.add("queue")
        if self.time_bound or call.asked.timeout_s:
            found.add("time")
        if call.asked.prompt in self.struck:
            found.add("struck")
        for first, last, name in self.aborts:
            if first <= call.ended_s and call.sent_s <= last and name in (None, call.asked.rid):
                found.add("abort")
        return found


def judge(client: Client, excuses: Excuses) -> list[str]:
    """What is wrong with what a client got."""
    problems = list(client.problems)
    closed = False
    for number, call in enumerate(client.calls):
        last = number == len(client.calls) - 1
        given = excuses.of(call)
        if call.hung and not (last and client.manners.stays):
            problems.append(f"{call.asked.path}: no answer")
        elif call.answer.complete:
            if last and client.manners.garbage:
                if call.answer.status != 400:
                    problems.append(f"garbage was answered {call.answer.status}")
            elif client.refused or closed:
                problems.append(f"{call.asked.path}: an answer after the last one")
            else:
                problems += _judge_answer(call, given)
        else:
            problems += _judge_part(call, given, client, last=last, closed=closed)
        closed |= call.answer.closes or not call.answer.complete
    return problems


def _judge_part(
    call: Call, given: set[str], client: Client, *, last: bool, closed: bool
) -> list[str]:
    """Of an answer that did not come to its end."""
    if client.refused:
        return [] if "drain" in given else ["the connection was refused"]
    # Who pipelines and leaves, leaves before all of its answers.
    leaves = not client.manners.patient and (last or client.manners.pipelines)
    # Whose bytes take longer than the server waits for them.
    late = client.manners.pieces and call.ended_s - call.sent_s >= SLOW_S
    # Between two answers the server may end a connection, and does where it is idle for long: it is
    # so too while its client has not read the last answer, or everybody is held up.
    slow = client.manners.read_pause_s or client.held_up
    idle = bool(slow) and call is not client.calls[0] and not call.answer.status
    excused = closed or "drain" in given or leaves or late or idle
    problems = [] if excused else [f"{call.asked.path}: the answer was cut off"]
    asked, answer = call.asked, call.answer
    if asked.form and asked.stream and answer.status == 200:
        try:
            said = read_stream(asked.form, answer.body, complete=False)
        except AssertionError as error:
            return [*problems, f"{asked.path}: a part of a stream: {error}"]
        problems += _judge_texts(asked, said, whole=False)
    return problems


def _judge_answer(call: Call, given: set[str]) -> list[str]:
    asked, answer = call.asked, call.answer
    where = f"{asked.path} {json.dumps(asked.body) if not isinstance(asked.body, bytes) else ''}"[
        :300
    ]
    problems = []
    if "x-request-id" not in answer.headers:
        problems.append("no X-Request-Id")
    if "x-loomserve-ignored" in answer.headers:
        problems.append(f"ignored: {answer.headers['x-loomserve-ignored']}")
    if answer.status != 200 or not asked.form:
        problems += _judge_status(call, given)
        return [f"{where}: {problem}" for problem in problems]
    try:
        if asked.stream:
            assert answer.headers["content-type"].startswith("text/event-stream")
            said = read_stream(asked.form, answer.body, complete=True)
        else:
            said = read_whole(asked.form, answer.body)
    except (AssertionError, KeyError, ValueError) as error:
        return [f"{where}: {type(error).__name__}: {error}: {answer.body[-300:]!r}"]
    if said.error:
        if not asked.fault and not given:
            problems.append(f"an error for no reason: {said.error}")
    else:
        answered = {"stop", "length"} & set(said.finishes.values())
        if asked.fault in ("failing row", "NaN") and answered:
            problems.append(f"{asked.fault}: an answer")
        if sorted(said.finishes) != list(range(asked.n)):
            problems.append(f"choices {sorted(said.finishes)} of {asked.n} have ended")
    problems += _judge_texts(asked, said, whole=not said.error)
    if asked.innocent and not said.error:
        problems += _judge_finishes(asked, said, given)
    return [f"{where}: {problem}" for problem in problems]


def _judge_status(call: Call, given: set[str]) -> list[str]:
    asked, answer = call.asked, call.answer
    status = answer.status
    problems = []
    if status >= 400 and asked.path != "/flush_cache":
        error = json.loads(answer.body)["error"]
        if not error["message"]:
            problems.append("an error without a message")
    excused = {
        503: {"drain", "dead", "queue"},
        504: {"time"},
        500: {"struck"},
    }.get(status, set())
    own = asked.fault and asked.form and status in (400, 500)
    took_s = call.ended_s - call.sent_s
    if status == 408 and took_s >= SLOW_S:
        excused = given = {"late"}
    if asked.path == "/health_generate" and took_s >= HEALTH_GENERATE_SECONDS:
        excused = given = {"late"}
    if status not in asked.statuses and not own and not excused & given:
        problems.append(f"status {status}: {answer.body[:200]!r}")
    if status == 200 and asked.form:
        problems.append("no text")
    return problems


def _judge_texts(asked: Asked, said: Said, *, whole: bool) -> list[str]:
    """Nobody's text is anything but its own, however it ended."""
    if not asked.innocent or asked.json_text:
        return []
    problems = []
    for index, text in said.texts.items():
        ended = whole and said.finishes.get(index) not in (None, "abort")
        # What is held back as the beginning of a stop is given out where there is no more.
        if text != asked.text if ended else not asked.unstopped.startswith(text):
            problems.append(f"choice {index} says {text!r}, not {asked.text!r}")
    return problems


def _judge_finishes(asked: Asked, said: Said, given: set[str]) -> list[str]:
    problems = []
    wanted = "stop" if asked.finish == "stop sequence" else asked.finish
    for index, finish in said.finishes.items():
        if asked.json_text:
            if finish == "stop":
                found = json.loads(said.texts[index])
                if not isinstance(found["a"], bool):
                    problems.append(f"{found} is not by its schema")
        elif finish == "abort":
            if not given & {"abort", "drain"}:
                problems.append("aborted by nobody")
        elif finish != wanted:
            problems.append(f"choice {index} ended by {finish}, not {wanted}")
    ends = set(said.finishes.values())
    if said.usage is not None and not asked.json_text and ends <= {"stop", "length"}:
        usage: tuple[Any, Any] = (len(asked.prompt), asked.tokens * asked.n)
        if said.usage != usage:
            problems.append(f"usage {said.usage}, not {usage}")
    return problems
