"""Streams of events as bytes on a connection."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.fakes import fake_runner, fake_server


async def connection(server):
    host, port = server.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


def request(version: str = "1.1", **fields) -> bytes:
    data = json.dumps({"prompt": "x", "max_tokens": 40, "stream": True, **fields}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def head_of(reader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0]
    return head.lower()


async def chunks_of(reader) -> list[bytes]:
    """The chunks of a body, which must be framed as RFC 9112 says, up to the last one."""
    chunks = []
    while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
        chunks.append(await reader.readexactly(size))
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    return chunks


def events_of(body: bytes) -> list[dict]:
    """Of whole events: each has one line of data."""
    *events, rest = body.decode().split("\n\n")
    assert rest == ""
    data = [event.removeprefix("data: ") for event in events]
    return [json.loads(text) for text in data if text != "[DONE]"]


def texts_of(events: list[dict]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


async def test_every_chunk_holds_whole_events_and_the_connection_serves_on():
    async with asyncio.timeout(20), fake_server() as server:
        reader, writer = await connection(server)
        for _ in range(2):
            writer.write(request())
            assert b"transfer-encoding: chunked" in await head_of(reader)
            chunks = await chunks_of(reader)
            events = [event for chunk in chunks for event in events_of(chunk)]
            assert texts_of(events) == {
                0: (await server.complete("x", max_tokens=40))["choices"][0]["text"]
            }
        writer.close()
        await server.wait_idle()


async def test_choices_whose_tokens_come_together_are_written_together():
    """One write for a step, not one for each of its choices."""
    async with asyncio.timeout(20), fake_server() as server:
        reader, writer = await connection(server)
        writer.write(request(n=4))
        await head_of(reader)
        chunks = await chunks_of(reader)
        counts = [len(events_of(chunk)) for chunk in chunks]
        texts = texts_of([event for chunk in chunks for event in events_of(chunk)])
        assert {index: len(text) for index, text in texts.items()} == dict.fromkeys(range(4), 40)
        assert max(counts) == 4
        assert sum(counts) > 3 * len(counts)
        writer.close()
        await server.wait_idle()


async def test_a_client_of_the_old_protocol_gets_events_without_chunks():
    async with asyncio.timeout(20), fake_server() as server:
        reader, writer = await connection(server)
        writer.write(request("1.0"))
        assert b"chunked" not in await head_of(reader)
        body = await reader.read()  # to the end of the connection
        assert len(texts_of(events_of(body))[0]) == 40
        writer.close()
        await server.wait_idle()


@pytest.mark.slow
async def test_events_that_are_larger_than_any_buffer_arrive_whole():
    """The first event of an echo has the text of the whole prompt."""
    prompt = "word " * 40_000
    runner = fake_runner(max_total_tokens=210_000)
    async with asyncio.timeout(60), fake_server(runner=runner, context_length=209_000) as server:
        reader, writer = await connection(server)
        writer.write(request(prompt=prompt, echo=True, max_tokens=3))
        await head_of(reader)
        chunks = await chunks_of(reader)
        assert max(map(len, chunks)) > len(prompt)
        events = [event for chunk in chunks for event in events_of(chunk)]
        assert texts_of(events)[0].startswith(prompt)
        writer.close()
        await server.wait_idle()
