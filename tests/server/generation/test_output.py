"""The stream between engine and handler."""

from __future__ import annotations

import asyncio
from array import array

import pytest

from runtime.errors import EngineDead
from runtime.request import Finish, FinishReason, Request, SamplingParams
from server.generation.output import Delta, RequestStream
from tests.fakes import deltas_of


def stream_of(choices: int) -> RequestStream:
    requests = [Request(str(i), array("i", [1]), SamplingParams(), 0.0) for i in range(choices)]
    return RequestStream(requests, 0.0)


STOP = Finish(FinishReason.STOP)


async def test_news_that_nobody_takes_merge_per_choice():
    stream = stream_of(2)
    for index, text in ((0, "a"), (1, "x"), (0, "b"), (0, "c")):
        stream.put_nowait(Delta(index, text, [ord(text)]))
    stream.put_nowait(Delta(0, "d", [ord("d")], finish=STOP))
    news = {delta.index: delta for delta in await stream.take()}
    assert (news[0].text, news[0].token_ids, news[0].finish) == ("abcd", list(b"abcd"), STOP)
    assert (news[1].text, news[1].finish) == ("x", None)


async def test_the_stream_ends_when_every_choice_has():
    stream = stream_of(2)
    stream.put_nowait(Delta(1, "x", finish=STOP))
    reader = asyncio.create_task(_all(stream))
    await asyncio.sleep(0)
    assert not reader.done()
    stream.put_nowait(Delta(0, "y", finish=STOP))
    assert await reader == [(1, "x"), (0, "y")]
    assert await stream.take() == []


async def test_a_failure_comes_after_what_is_pending():
    stream = stream_of(1)
    stream.put_nowait(Delta(0, "last words"))
    stream.fail(EngineDead("over"))
    assert [delta.text for delta in await stream.take()] == ["last words"]
    with pytest.raises(EngineDead, match="over"):
        await stream.take()


async def test_a_failure_wakes_a_waiting_reader():
    stream = stream_of(1)
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    stream.fail(EngineDead("over"))
    with pytest.raises(EngineDead):
        await reader


async def test_a_reader_that_is_cancelled_loses_nothing():
    stream = stream_of(1)
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    stream.put_nowait(Delta(0, "still here"))
    assert [delta.text for delta in await stream.take()] == ["still here"]


async def _all(stream: RequestStream) -> list[tuple[int, str]]:
    return [(delta.index, delta.text) async for delta in deltas_of(stream)]
