"""Limits and safety: keys, sizes, counts, times, readers that do not read, ids, logs."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging

import pytest

from tests.fakes import fake_runner, fake_server, live

ORIGIN = "http://localhost:5173"


async def raw_connection(server):
    host, port = server.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


def raw_post(body: dict, path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic sesame"}, 401),
        ({"Authorization": "Bearer sesame"}, 200),
        ({"Authorization": "bearer sesame"}, 200),
        ({"X-Api-Key": "sesame"}, 200),
        ({"X-Api-Key": "sesam\u00e9"}, 401),
    ],
    ids=["none", "wrong", "scheme", "bearer", "lower-case", "x-api-key", "not-ascii"],
)
async def test_a_key_is_asked_for_where_one_is_set(headers, status):
    async with fake_server(api_key="sesame") as server:
        found, body = await server.get("/v1/models", headers=headers)
        assert found == status
        if status == 401:
            assert body["error"]["code"] == "invalid_api_key"
        assert (await server.get("/health"))[0] == 200
        _, info = await server.get("/server_info", headers={"X-Api-Key": "sesame"})
        assert info["options"]["api_key"] is True
        assert "sesame" not in json.dumps(info)


async def test_a_body_over_the_limit_is_413_in_openai_form():
    async with fake_server(max_body_bytes=1000) as server:
        status, body = await server.post("/v1/completions", {"prompt": "x" * 2000})
        assert status == 413
        assert body["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("path", ["/v1/nothing", "/page", "/v1/models/other"])
async def test_unknown_paths_and_models_are_404_in_openai_form(path):
    async with fake_server() as server:
        status, body = await server.get(path)
        assert status == 404
        assert body["error"]["type"] == "invalid_request_error"


async def test_a_wrong_method_names_the_right_one():
    async with fake_server() as server:
        status, body = await server.get("/v1/completions")
        assert status == 405
        assert "POST" in body["error"]["message"]


async def test_an_unknown_model_is_404():
    async with fake_server() as server:
        status, body = await server.post("/v1/completions", {"model": "other", "prompt": "x"})
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        assert "'other'" in body["error"]["message"]
        assert "'fake'" in body["error"]["message"]


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b'{"prompt": NaN}', b'"text"', b"[1]"])
async def test_a_body_that_is_no_json_object_is_400(data):
    async with (
        fake_server() as server,
        server.client.post(server.url + "/v1/completions", data=data) as answer,
    ):
        assert answer.status == 400
        assert (await answer.json())["error"]["type"] == "invalid_request_error"


async def test_cors_headers_are_on_plain_streamed_and_error_answers():
    async with fake_server(cors_allow_origins=ORIGIN + ", http://other") as server:
        bodies = [{"prompt": "x"}, {"prompt": "x", "stream": True}, {"prompt": "x", "top_p": 5}]
        for body in bodies:
            for origin, allowed in ((ORIGIN, ORIGIN), ("http://evil", None)):
                async with server.client.post(
                    server.url + "/v1/completions", json=body, headers={"Origin": origin}
                ) as answer:
                    assert answer.headers.get("Access-Control-Allow-Origin") == allowed
        preflight = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
        async with server.client.options(
            server.url + "/v1/completions", headers=preflight
        ) as answer:
            assert answer.status == 204
            assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
            assert "Authorization" in answer.headers["Access-Control-Allow-Headers"]


async def test_without_the_option_there_are_no_cors_headers():
    async with (
        fake_server() as server,
        server.client.get(server.url + "/v1/models", headers={"Origin": ORIGIN}) as answer,
    ):
        assert "Access-Control-Allow-Origin" not in answer.headers


async def test_request_ids_come_back_and_odd_ones_are_replaced():
    async with fake_server() as server:
        for given, kept in (("abc-1", True), ("x" * 200, False), ("a b", False)):
            async with server.client.get(
                server.url + "/health", headers={"X-Request-Id": given}
            ) as answer:
                assert (answer.headers["X-Request-Id"] == given) is kept
                assert answer.headers["X-Request-Id"]


async def test_equal_client_ids_at_once_are_both_served():
    async with fake_server() as server:
        headers = {"X-Request-Id": "same"}
        asked = [
            server.post("/v1/completions", {"prompt": p, "rid": "same"}, headers=headers)
            for p in ("a", "a", "b")
        ]
        (_, one), (_, two), (_, three) = await asyncio.gather(*asked)
        assert one["choices"][0]["text"] == two["choices"][0]["text"]
        assert one["choices"][0]["text"] != three["choices"][0]["text"]
        assert len({one["id"], two["id"], three["id"]}) == 3


async def test_connections_over_the_cap_get_503_at_once():
    async with fake_server(max_connections=2) as server:
        kept = [await raw_connection(server) for _ in range(2)]
        reader, writer = await raw_connection(server)
        answer = (await reader.read()).decode()
        assert answer.startswith("HTTP/1.1 503")
        assert "Retry-After: 1" in answer
        assert "too_many_connections" in answer
        writer.close()
        for _, one in kept:
            one.close()
        # No event says that the server has noticed.
        async with asyncio.timeout(10):
            while len(server.service.connections):  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert (await server.get("/health"))[0] == 200


async def test_a_connection_that_sends_no_request_head_is_closed():
    async with asyncio.timeout(10), fake_server(header_timeout=0.05) as server:
        reader, writer = await raw_connection(server)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        assert await reader.read() == b""
        writer.close()


async def test_an_idle_connection_is_closed_but_not_while_it_is_answered():
    slow = fake_runner(step_seconds=lambda batch: 0.02)
    async with asyncio.timeout(10), fake_server(runner=slow, idle_timeout=0.05) as server:
        reader, writer = await raw_connection(server)
        writer.write(raw_post({"prompt": "x", "max_tokens": 8}))
        answer = await reader.read()  # ends when the server closes
        assert answer.startswith(b"HTTP/1.1 200")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 8
        writer.close()


async def test_a_body_that_does_not_come_is_408():
    async with asyncio.timeout(10), fake_server(body_timeout=0.05) as server:
        reader, writer = await raw_connection(server)
        writer.write(raw_post({"prompt": "x" * 100})[:-20])
        answer = await reader.readuntil(b"}}")
        assert answer.startswith(b"HTTP/1.1 408")
        writer.close()


async def test_a_full_queue_is_503_with_retry_after():
    slow = fake_runner(step_seconds=lambda batch: 0.01)
    options = {"max_queued_requests": 1, "max_running_requests": 1}
    async with fake_server(runner=slow, scheduler=options) as server:
        running = asyncio.create_task(server.complete("a", max_tokens=30))
        scheduler = server.service.engine.scheduler
        async with asyncio.timeout(10):
            while not scheduler.statistics().in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0)
        waiting = asyncio.create_task(server.complete("b", max_tokens=2))
        async with asyncio.timeout(10):
            while not scheduler.statistics().waiting:  # noqa: ASYNC110
                await asyncio.sleep(0)
        async with server.client.post(
            server.url + "/v1/completions", json={"prompt": "c"}
        ) as answer:
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) >= 1
            assert (await answer.json())["error"]["type"] == "overloaded_error"
        await asyncio.gather(running, waiting)
        await server.wait_idle()


@pytest.mark.slow
async def test_a_reader_that_stops_reading_is_cut_off_and_holds_nobody_up():
    # Events of some 300 bytes: enough of them fill the sockets' buffers on both sides.
    async with (
        asyncio.timeout(60),
        fake_server(slow_reader_timeout=0.2, context_length=60000) as server,
    ):
        reader, writer = await raw_connection(server)
        writer.write(raw_post({"prompt": "x", "max_tokens": 50000, "stream": True}))
        await reader.readuntil(b"data: ")
        other = await server.complete("y", max_tokens=50)
        assert other["usage"]["completion_tokens"] == 50
        while server.service.generator.live:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await server.wait_idle()
        writer.close()


@pytest.mark.slow
async def test_a_slow_reader_gets_everything_in_larger_pieces():
    async with asyncio.timeout(60), fake_server(context_length=60000) as server:
        reader, writer = await raw_connection(server)
        writer.write(raw_post({"prompt": "x", "max_tokens": 40000, "stream": True}))
        await reader.readuntil(b"data: ")
        while live(server.service):  # the model is done long before the client has read  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        text, events = "", 0
        while (line := await reader.readline()).strip() != b"data: [DONE]":
            if line.startswith((b"data: {", b"{")):
                events += 1
                text += json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
        assert len(text) == 40000
        assert events < 40000
        writer.close()
        await server.wait_idle()


async def test_the_access_log_holds_no_prompt_no_query_and_no_key(caplog):
    caplog.set_level(logging.DEBUG)
    logging.getLogger("loomserve.access").propagate = True
    headers = {"Authorization": "Bearer sesame", "X-Request-Id": "r-1"}
    async with fake_server(access_log=True, api_key="sesame") as server:
        await server.post(
            "/v1/completions?token=hush", {"prompt": "my secret plan"}, headers=headers
        )
        await server.post("/v1/completions", {"prompt": "my secret", "n": -1}, headers=headers)
    lines = [json.loads(r.getMessage()) for r in caplog.records if r.name == "loomserve.access"]
    assert [(line["path"], line["status"], line["request_id"]) for line in lines] == [
        ("/v1/completions", 200, "r-1"),
        ("/v1/completions", 400, "r-1"),
    ]
    assert "secret" not in caplog.text
    assert "hush" not in caplog.text
    assert "sesame" not in caplog.text


async def test_a_crowd_of_health_checks_disturbs_nobody():
    async with fake_server(runner=fake_runner(step_seconds=lambda batch: 0.001)) as server:

        async def give_up():
            _, writer = await raw_connection(server)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            writer.close()

        asked = [server.complete(f"{i}", max_tokens=24) for i in range(4)]
        checks = [server.get("/health") for _ in range(32)]
        results = await asyncio.gather(*asked, *checks, *(give_up() for _ in range(32)))
        assert all(body["usage"]["completion_tokens"] == 24 for body in results[:4])
        assert all(status == 200 for status, _ in results[4:36])
        await server.wait_idle()


async def test_health_generate_makes_one_token_and_leaves_nothing():
    async with fake_server() as server:
        assert (await server.get("/health_generate"))[0] == 200
        await server.wait_idle()


async def test_refused_requests_leave_nothing_behind():
    async with fake_server() as server:
        bodies = [
            {"prompt": "x" * 5000},
            {"prompt": [[1, 2], [999999]]},
            {"prompt": "x", "temperature": -1},
            {"prompt": ["x", "y" * 5000]},
        ]
        for i in range(500):
            status, _ = await server.post("/v1/completions", bodies[i % 4])
            assert status == 400
        assert live(server.service) == 0
        assert not server.service.generator.live
        assert server.service.engine.scheduler.requests == []
        await server.wait_idle()
        await server.complete(max_tokens=2)


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        pytest.param("gzip", b"\x1f\x8b\x00garbage", id="gzip"),
        pytest.param("deflate", b"\x1f\x8b\x00garbage", id="deflate"),
        pytest.param("gzip", gzip.compress(b'{"prompt": "a"}')[:-9], id="cut"),
        pytest.param("gzip", gzip.compress(b'{"prompt": "a"}') + b"more", id="more-behind-it"),
        pytest.param("gzip", gzip.compress(b'{"prompt": "a"}') * 2, id="two-in-one"),
    ],
)
async def test_a_body_that_cannot_be_decompressed_is_the_client_s_fault(encoding, data):
    async with fake_server() as server:
        headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
        url = server.url + "/v1/completions"
        async with server.client.post(url, data=data, headers=headers) as answer:
            assert answer.status == 400
            assert encoding in (await answer.json())["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e300},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"logit_bias": {"١": 1}},
    ],
    ids=str,
)
async def test_numbers_that_float32_cannot_hold_are_refused(fields):
    async with fake_server() as server:
        status, body = await server.post("/v1/completions", {"prompt": "a", **fields})
        assert status == 400
        assert body["error"]["param"].startswith(next(iter(fields)))
