"""Bodies that are not sent as their head says: answered at once, and not when their time is over."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes import fake_server, live

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
BROKEN = {
    "a size that is no number": b"zz\r\nabc\r\n",
    "a negative size": b"-1\r\n",
    "a size beyond 64 bits": b"fffffffffffffffff\r\n",
    "a size with blanks": b" 2 \r\n{}\r\n0\r\n\r\n",
    "a size that ends in a bare line feed": b"2\n{}\n0\n\n",
    "a chunk longer than its size": b"3\r\nabcdef\r\n0\r\n\r\n",
    "a trailer without a colon": b"0\r\nno trailer\r\n\r\n",
    "a giant trailer": b"0\r\nx: " + b"a" * 1_000_000 + b"\r\n\r\n",
    "100,000 trailers": b"0\r\n" + b"".join(b"t%d: x\r\n" % i for i in range(100_000)) + b"\r\n",
}


async def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


@pytest.mark.parametrize("chunks", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("apart", [False, True], ids=["with its head", "after its head"])
async def test_a_broken_chunked_body_is_400_at_once(chunks, apart):
    async with fake_server(body_timeout=600.0) as server:
        reader, writer = await connect(server)
        if apart:  # the handler is there and waits for the body
            writer.write(HEAD.replace(b"Host: x\r\n", b"Host: x\r\nExpect: 100-continue\r\n"))
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        else:
            writer.write(HEAD)
        writer.write(chunks)
        async with asyncio.timeout(30):
            try:
                answer = await reader.read()  # to its end: the connection is closed
            except ConnectionResetError:  # closed while more of it was on its way
                answer = b" 400 invalid_http"
        assert b" 400 " in answer
        assert b"invalid_http" in answer
        assert answer.count(b"HTTP/1.") <= 1
        writer.close()
        assert not live(server.service)
