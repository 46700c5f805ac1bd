"""When a stream is opened and kept alive, on a clock of the test's own."""

from __future__ import annotations

import asyncio
import random

import pytest

from server.http.heartbeat import OPEN_AFTER_S, heartbeat
from tests.world.loop import WorldLoop


class Stream:
    """What is sent when, in place of a connection."""

    def __init__(self, *, unread: bool = False) -> None:
        self._now = asyncio.get_running_loop().time
        self.unread = unread
        self.opened_s: float | None = None
        self.sent_s = self._now()
        self.beats: list[float] = []

    async def open(self) -> None:
        self.opened_s = self.sent_s = self._now()

    async def send(self, data: bytes) -> None:
        assert data == b"beat"
        self.beats.append(self._now())
        self.sent_s = self._now()


async def until(moment_s: float) -> None:
    """Waits for a moment of the loop's clock, which is virtual."""
    loop = asyncio.get_running_loop()
    came = loop.create_future()
    loop.call_at(moment_s, came.set_result, None)
    await came


def beats_of(every_s: float, news: list[float], *, unread: bool = False) -> Stream:
    """A stream of 20 s with news at these moments."""

    async def main() -> Stream:
        out = Stream(unread=unread)
        begun = asyncio.get_running_loop().time()
        async with heartbeat(out, every_s, lambda: b"beat"):  # type: ignore[arg-type]
            for moment in [*news, 20.0]:
                await until(begun + moment)
                out.sent_s = asyncio.get_running_loop().time()
        await until(begun + 100.0)  # nothing comes after its end
        return out

    return WorldLoop(random.Random(0)).run(main())


def test_it_opens_in_time_and_beats_after_each_silence():
    out = beats_of(4.0, [6.0, 7.0, 10.5])
    assert out.opened_s == pytest.approx(OPEN_AFTER_S)
    assert out.beats == pytest.approx([4.05, 14.5, 18.5])


def test_it_is_off_at_0():
    out = beats_of(0.0, [])
    assert out.opened_s is None
    assert out.beats == []


def test_who_has_not_read_what_was_sent_is_told_no_more():
    assert beats_of(4.0, [], unread=True).beats == []


def test_what_fails_in_a_beat_ends_the_beats_alone(caplog):
    def broken() -> bytes:
        raise ZeroDivisionError

    async def main() -> str:
        async with heartbeat(Stream(), 1.0, broken):  # type: ignore[arg-type]
            await until(asyncio.get_running_loop().time() + 20.0)
            return "the end"

    assert WorldLoop(random.Random(0)).run(main()) == "the end"
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [
        ZeroDivisionError
    ]
