"""What clients hold in memory is counted, shown and bounded."""

from __future__ import annotations

import asyncio
import json
import re
import socket

import pytest

from runtime.errors import QueueFull
from server.http.bodies import LARGEST_AT_ONCE, SMALL, Bodies
from server.http.sockets import listen
from tests import fakes
from tests.fakes import fake_server, live


def test_a_body_counts_as_long_as_it_is_held_and_never_more_than_the_largest():
    bodies = Bodies(1_000_000)
    with bodies.held(1000), bodies.held(10**18), bodies.held(None):
        assert bodies.bytes == 2_001_000
    assert bodies.bytes == 0


def test_there_is_room_for_so_many_of_the_largest_and_always_for_small_ones():
    bodies = Bodies(1_000_000)
    held = [bodies.held(None) for _ in range(LARGEST_AT_ONCE)]
    for one in held:
        one.__enter__()
    with pytest.raises(QueueFull, match="at most 64000000 may be"), bodies.held(SMALL + 1):
        raise AssertionError("there was room")
    with bodies.held(SMALL):
        assert bodies.bytes == LARGEST_AT_ONCE * 1_000_000 + SMALL
    held[0].__exit__(None, None, None)
    with bodies.held(1_000_000):
        pass


async def figures(server) -> dict[str, float]:
    async with server.client.get(server.url + "/metrics") as answer:
        text = await answer.text()
    return {
        name: float(value)
        for name, value in re.findall(r"^loomserve:(\w+)\{.*\} (\S+)$", text, re.M)
    }


async def half_a_body(server, length: int):
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n"
    writer.write(head.encode() + b"Expect: 100-continue\r\n\r\n")
    return reader, writer


async def test_bodies_on_their_way_are_shown_and_those_that_find_no_room_are_503():
    size = 100_000
    async with fake_server(max_body_bytes=size) as server:
        opened = [await half_a_body(server, size) for _ in range(LARGEST_AT_ONCE)]
        for reader, _ in opened:
            assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
        assert (await figures(server))["request_body_bytes"] == LARGEST_AT_ONCE * size
        memory = (await server.get("/debug/requests"))[1]["memory"]
        assert memory["body_bytes"] == memory["body_bytes_bound"] == LARGEST_AT_ONCE * size
        assert memory["connections"] >= LARGEST_AT_ONCE
        reader, writer = await half_a_body(server, size)
        await reader.readuntil(b"\r\n\r\n")
        assert b" 503 " in await reader.readuntil(b"\r\n")
        await server.complete("small", max_tokens=1)
        for _, other in (*opened, (reader, writer)):
            other.close()
        async with asyncio.timeout(20):
            while server.service.bodies.bytes:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def test_what_a_client_does_not_take_is_shown():
    async with fake_server() as server:
        host, port = server.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        for _ in range(200):  # answers of 70 kB that are never read
            writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(20):
            while not (await figures(server))["unsent_answer_bytes"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        writer.transport.abort()
        async with asyncio.timeout(20):
            while (await figures(server))["unsent_answer_bytes"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert len(server.service.connections) == 1  # that of the one who asks for the figures


async def test_what_a_client_makes_no_room_for_is_its_own_answer_and_is_shown(monkeypatch):
    """Beside what the transport of its connection takes: those of a stream no more than 64 KiB and
    the events of one piece."""

    def listen_in_small(*where):
        sockets = listen(*where)
        for sock in sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return sockets

    monkeypatch.setattr(fakes, "listen", listen_in_small)
    most = 3000
    async with asyncio.timeout(60), fake_server(context_length=most + 100) as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = {"prompt": "x", "max_tokens": most, "ignore_eos": True, "stream": True}
        data = json.dumps({**body, "logprobs": 5}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(data) + data)
        await reader.readuntil(b"data: ")
        while live(server.service):  # the model is done  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        memory = (await server.get("/debug/requests"))[1]["memory"]
        assert 0 < memory["unread_tokens_of_one"] <= memory["unread_tokens"] < most
        assert (await figures(server))["unread_tokens"] == memory["unread_tokens"]
        assert 0 < memory["unsent_answer_bytes_of_one"] < 65_536 + 128 * 1000
        writer.transport.abort()
        while server.service.generator.live:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        memory = (await server.get("/debug/requests"))[1]["memory"]
        assert memory["unread_tokens"] == memory["unsent_answer_bytes_of_one"] == 0
