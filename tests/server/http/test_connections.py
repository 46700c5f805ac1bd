"""Connections as others open them: half closed, without TLS's handshake, with what is no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import ssl
from urllib.parse import urlsplit

import pytest

from server.args import make_config
from server.launcher import tls_context
from tests.fakes import fake_runner, fake_server


async def connect(server, **options):
    address = urlsplit(server.url)
    return await asyncio.open_connection(address.hostname, address.port, **options)


async def exchange(server, data: bytes, *, half_close: bool = False) -> bytes:
    """All that is answered until the server closes."""
    reader, writer = await connect(server)
    writer.write(data)
    if half_close:
        writer.write_eof()
    try:
        return await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()


def post(body: dict, path: str = "/v1/completions", version: str = "1.1") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def closed(server) -> None:
    """Until nothing is connected any more."""
    async with asyncio.timeout(20):
        while len(server.service.connections):  # noqa: ASYNC110 (told by nobody)
            await asyncio.sleep(0.005)


def without_interim(answer: bytes) -> bytes:
    return answer.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")


SLOW = {"prompt": "a", "max_tokens": 30, "ignore_eos": True}


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        pytest.param(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", rb'"ok"', id="at-once"),
        pytest.param(b"GET /health HTTP/1.0\r\n\r\n", rb'"ok"', id="HTTP/1.0"),
        pytest.param(post(SLOW), rb'"completion_tokens":30', id="whole"),
        pytest.param(post({**SLOW, "stream": True}), rb"\[DONE\]", id="streamed"),
        pytest.param(post(SLOW) * 2, rb'(?s)"completion_tokens":30.*tokens":30', id="pipelined"),
    ],
)
def test_a_client_that_ends_its_side_gets_its_answer(run, request_, answer):
    async def main():
        runner = fake_runner(step_seconds=lambda batch: 0.004)
        async with fake_server(runner=runner) as server:
            given = await exchange(server, request_, half_close=True)
            assert re.search(answer, given)
            assert without_interim(given).startswith(b"HTTP/1.")
            assert b"100 Continue" not in without_interim(given)
            await closed(server)

    run(main())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_client_that_has_left_frees_what_it_held(run, stream, version):
    async def main():
        body = {"prompt": "a", "max_tokens": 20_000, "ignore_eos": True, "stream": stream}
        runner = fake_runner(step_seconds=lambda batch: 0.005)
        async with fake_server(runner=runner, context_length=30_000) as server:
            _, writer = await connect(server)
            writer.write(post(body, version=version))
            async with asyncio.timeout(20):
                while not server.service.generator.live:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
            writer.close()
            await closed(server)
            await server.wait_idle()
            ended = server.service.engine.scheduler.statistics().counters.finished
            assert {reason: count for reason, count in ended.items() if count} == {"abort": 1}

    run(main())


@pytest.mark.parametrize("part", [b"GET /health HTT", post(SLOW)[:-5]], ids=["head", "body"])
def test_a_request_that_will_never_be_whole_is_not_waited_for(run, part):
    async def main():
        async with fake_server() as server, asyncio.timeout(10):
            assert await exchange(server, part, half_close=True) == b""
            await closed(server)

    run(main())


@contextlib.asynccontextmanager
async def tls_server(certificate, **options):
    cert, key = map(str, certificate)
    tls = tls_context(make_config({"ssl_certfile": cert, "ssl_keyfile": key}))
    async with fake_server(tls=tls, **options) as server:
        yield server, ssl.create_default_context(cafile=cert)


def test_connections_in_their_handshake_are_counted_and_time_out(run, certificate):
    async def main():
        options = {"max_connections": 2, "header_timeout": 0.5}
        async with tls_server(certificate, **options) as (server, trust), asyncio.timeout(20):
            silent = [await connect(server) for _ in range(2)]
            with pytest.raises(OSError):  # noqa: PT011 (by how far the handshake came)
                await connect(server, ssl=trust)
            for reader, writer in silent:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
                writer.close()
            await closed(server)
            reader, writer = await connect(server, ssl=trust)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
            await closed(server)

    run(main())


def test_what_is_no_handshake_is_closed_and_forgotten(run, certificate, caplog):
    async def main():
        async with tls_server(certificate) as (server, _), asyncio.timeout(20):
            assert b"HTTP/1" not in await exchange(server, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            _, writer = await connect(server)
            writer.close()
            _, writer = await connect(server)
            writer.write(b"\x16\x03\x01\x02\x00")
            writer.transport.abort()
            await closed(server)

    run(main())
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_silent_client_after_the_handshake_has_the_head_s_time(run, certificate):
    async def main():
        options = {"header_timeout": 0.3}
        async with tls_server(certificate, **options) as (server, trust), asyncio.timeout(20):
            reader, writer = await connect(server, ssl=trust)
            assert await reader.read() == b""
            writer.close()
            await closed(server)

    run(main())


def said(caplog) -> list[logging.LogRecord]:
    """What the server and its libraries said, but for how late a busy machine has made the loop."""
    of_them = [one for one in caplog.records if one.name.startswith(("aiohttp", "loomserve"))]
    return [record for record in of_them if record.name != "loomserve.loop"]


@pytest.mark.parametrize(
    ("data", "named"),
    [
        pytest.param(b"GARBAGE\r\n\r\n", "GARBAGE", id="garbage"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00", "HTTPS", id="tls"),
        pytest.param(b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", "url path", id="path"),
        pytest.param(b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n", "http://[::1", id="url"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", "Host", id="no-host"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", "Host", id="two-hosts"),
        pytest.param(b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", "header", id="header"),
        pytest.param(b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", "8190", id="long-line"),
        pytest.param(
            b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
            "Transfer-Encoding",
            id="two-lengths",
        ),
        pytest.param(
            b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", "Length", id="length"
        ),
    ],
)
async def test_what_is_no_http_is_400_in_json_and_one_line_of_log(caplog, data, named):
    with caplog.at_level(logging.INFO):
        async with fake_server() as server:
            head, _, body = (await exchange(server, data)).partition(b"\r\n\r\n")
            assert (await server.get("/health"))[0] == 200
    assert re.match(rb"HTTP/1\.[01] 400 ", head)
    assert b"application/json" in head
    error = json.loads(body)["error"]
    assert error["code"] == "invalid_http"
    assert named in error["message"]
    lines = said(caplog)
    assert len(lines) == 1
    assert lines[0].exc_info is None
    assert len(lines[0].getMessage().splitlines()) == 1


async def test_who_tries_http_2_is_told_so_and_fills_no_log(caplog):
    """As routers do with each server that they know, over and over."""
    with caplog.at_level(logging.INFO):
        async with fake_server() as server:
            answer = await exchange(server, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert re.match(rb"HTTP/1\.[01] 400 ", answer)
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert "begins as HTTP/2 does; HTTP/1.1 and 1.0 are served" in error["message"]
    assert said(caplog) == []


@pytest.mark.parametrize(
    "line", [b"GET /health\r\n", b"GET /health HTTP/0.9\r\n", b"GET /health HTTP/2.0\r\n"]
)
async def test_other_versions_are_refused_in_http_1_1(line):
    async with fake_server() as server:
        answer = await exchange(server, line + b"Host: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 505 ") or b" 400 " in answer[:20]
    assert b'"ok"' not in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
