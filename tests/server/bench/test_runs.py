"""Loads sent to a server that answers from a script."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import pytest
from aiohttp import web

from server.bench.arrivals import Arrivals
from server.bench.run import run_load
from server.bench.target import Target
from tests.server.bench.fake_openai import FakeServer, send, serving
from tests.server.bench.scripted import load


async def run(url: str, some_load=None, **target):
    return await run_load(Target(url, target.pop("model", ""), **target), some_load or load())


async def summary_of(url: str, some_load=None, **target):
    return (await run(url, some_load, **target)).summary()


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_counts_tokens_requests_and_times_of_a_closed_loop(endpoint):
    fake = FakeServer()
    async with serving(fake) as url:
        summary = await summary_of(url + "v1", endpoint=endpoint)
    assert summary["model"] == "fake"
    assert (summary["requests"], summary["completed"], summary["errors"]) == (12, 12, {})
    assert summary["output_tokens"] == 48
    assert summary["prompt_tokens"] == 84
    assert summary["cached_tokens"] == 36
    assert summary["short_answers"] == summary["usage_missing"] == summary["cut"] == 0
    assert fake.most_running == 3
    assert 0 < summary["ttft_ms"]["p50"] <= summary["e2e_ms"]["p50"] <= summary["e2e_ms"]["max"]
    assert summary["output_tokens_per_s"] == pytest.approx(48 / summary["wall_s"], rel=0.01)
    assert summary["client"]["cpu_share"] > 0


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_each_protocol_has_its_body(endpoint):
    fake = FakeServer()
    async with serving(fake) as url:
        await run(url, load(requests=1), endpoint=endpoint, ignore_eos=True, extra={"top_k": 3})
    (body,) = fake.bodies
    assert body["ignore_eos"] is True
    assert body["top_k"] == 3
    assert body["max_tokens"] == 4
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    if endpoint == "chat":
        ((role, text),) = [(one["role"], one["content"]) for one in body["messages"]]
        assert role == "user"
    else:
        text = body["prompt"]
    assert 5 <= len(text.split()) <= 9


async def test_the_key_goes_with_every_request():
    keys = []

    async def check(request, body):
        keys.append(request.headers.get("Authorization"))
        return await fake._stream(request, body)

    fake = FakeServer(check)
    async with serving(fake) as url:
        await run(url, load(requests=2), api_key="secret")
    assert keys == ["Bearer secret"] * 2


async def test_open_loop_sends_every_request_whatever_the_server_does():
    """No answer comes before all requests have arrived: a closed loop would never get there."""
    arrived = asyncio.Event()

    async def hold(request, body):
        if len(fake.bodies) == 6:
            arrived.set()
        await arrived.wait()
        return await fake._stream(request, body)

    fake = FakeServer(hold)
    async with serving(fake) as url:
        done = await run(url, load(Arrivals("poisson", 500.0), requests=6))
    assert done.summary()["completed"] == 6
    assert fake.most_running == 6
    expected = Arrivals("poisson", 500.0).times(6, 1)
    for answer, at in zip(done.answers, expected, strict=False):
        assert answer.due == pytest.approx(done.origin + at)
        assert answer.start >= answer.due


async def test_a_file_s_times_hold(tmp_path):
    path = tmp_path / "azure.csv"
    rows = "2024-01-01 00:00:00.0,5,2\n2024-01-01 00:00:03.0,6,3\n"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    fake = FakeServer()
    async with serving(fake) as url:
        done = await run(url, load(kind="azure", file=path, speed=30.0, concurrency=0))
    first, second = done.answers
    assert second.due - first.due == pytest.approx(0.1)
    assert second.start - first.due >= 0.1
    assert [body["max_tokens"] for body in fake.bodies] == [2, 3]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_turns_wait_for_one_another_and_quote_the_answers(endpoint):
    fake = FakeServer()
    some_load = load(kind="multi-turn", requests=6, turns=3, concurrency=1)
    async with serving(fake) as url:
        done = await run(url, some_load, endpoint=endpoint)
    assert [answer.tag for answer in done.answers] == ["turn 1", "turn 2", "turn 3"] * 2
    assert fake.most_running == 1
    for number, (earlier, later) in enumerate(pairwise(fake.bodies)):
        if number % 3 == 2:  # another conversation begins
            continue
        if endpoint == "chat":
            head, (answer, asked) = later["messages"][:-2], later["messages"][-2:]
            assert head == earlier["messages"]
            assert answer == {"role": "assistant", "content": "aaaa"}
            assert asked["role"] == "user"
        else:
            assert later["prompt"].startswith(earlier["prompt"] + "\naaaa\n")


async def test_a_conversation_ends_where_a_turn_fails():
    async def fail_second(request, body):
        if len(fake.bodies) == 2:
            return web.json_response({"error": {"message": "no"}}, status=500)
        return await fake._stream(request, body)

    fake = FakeServer(fail_second)
    async with serving(fake) as url:
        done = await run(url, load(kind="multi-turn", requests=8, turns=4, concurrency=1))
    assert [answer.tag for answer in done.answers] == [
        *("turn 1", "turn 2"),
        *("turn 1", "turn 2", "turn 3", "turn 4"),
    ]
    assert done.summary()["errors"] == {"HTTP 500": 1}


async def test_failures_are_counted_by_kind_and_do_not_end_the_run():
    async def fail_some(request, body):
        number = len(fake.bodies)
        if number % 4 == 1:
            return web.json_response({"error": {"message": f"too many: {number}"}}, status=503)
        if number % 4 == 2:
            response = web.StreamResponse()
            await response.prepare(request)
            await send(response, {"error": {"message": "broken"}})
            return response
        if number % 4 == 3:
            return web.Response(text="data: [DONE]\n\n")
        return await fake._stream(request, body)

    fake = FakeServer(fail_some)
    async with serving(fake) as url:
        summary = await summary_of(url, load(concurrency=1))
    assert summary["completed"] == 3
    assert summary["errors"] == {"HTTP 503": 3, "error in the stream": 3, "no token": 3}
    assert "too many: 1" in summary["error_examples"]["HTTP 503"]
    assert "broken" in summary["error_examples"]["error in the stream"]


@pytest.mark.parametrize("event", [b"{", b"[1]", b'{"choices": [1]}', b'{"choices": 3}'])
async def test_an_event_that_cannot_be_read_fails_its_request_alone(event):
    async def odd(request, body):
        if len(fake.bodies) == 1:
            return web.Response(body=b"data: " + event + b"\n\n")
        return await fake._stream(request, body)

    fake = FakeServer(odd)
    async with serving(fake) as url:
        summary = await summary_of(url, load(concurrency=1))
    assert summary["errors"] == {"error in the stream": 1}
    assert summary["completed"] == 11


async def test_a_server_that_hangs_up_is_told_as_such():
    async def hang_up(request, body):
        response = web.StreamResponse()
        await response.prepare(request)
        await send(response, {"choices": [{"text": "a", "finish_reason": None}]})
        request.transport.abort()
        return response

    async with serving(FakeServer(hang_up)) as url:
        summary = await summary_of(url, load(requests=2))
    assert sum(summary["errors"].values()) == 2
    assert all(kind.startswith("Client") for kind in summary["errors"])


async def test_a_run_ends_in_time_and_what_still_ran_is_cut():
    forever = asyncio.Event()

    async def hold_some(request, body):
        if len(fake.bodies) > 2:
            await forever.wait()
        return await fake._stream(request, body)

    fake = FakeServer(hold_some)
    async with serving(fake) as url:
        done = await run(url, load(concurrency=4, max_seconds=0.4))
        summary = done.summary()
        forever.set()
    assert (summary["requests"], summary["completed"], summary["cut"]) == (6, 2, 4)
    assert summary["errors"] == {}
    assert summary["wall_s"] >= 0.4
    assert all(answer.end >= answer.start for answer in done.answers)


async def test_a_request_s_own_time_limit_is_an_error():
    forever = asyncio.Event()

    async def hold(request, body):
        await forever.wait()
        return web.Response()

    async with serving(FakeServer(hold)) as url:
        summary = await summary_of(url, load(requests=1), timeout_s=0.1, model="fake")
        forever.set()
    assert summary["errors"] == {"timeout": 1}


async def test_missing_usage_is_replaced_by_counting_chunks():
    async def without_usage(request, body):
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(2):
            await send(response, {"choices": [{"text": "a", "finish_reason": None}]})
        return response

    async with serving(FakeServer(without_usage)) as url:
        summary = await summary_of(url)
    assert summary["usage_missing"] == 12
    assert summary["output_tokens"] == 24
    assert summary["short_answers"] == 12


async def test_events_are_read_however_the_network_cuts_them():
    async def cut(request, body):
        response = web.StreamResponse()
        await response.prepare(request)
        event = json.dumps({"choices": [{"text": "é", "finish_reason": None}]}).encode()
        for byte in b"data: " + event + b"\r\n\r\n: a comment\n\ndata: [DONE]\n\n":
            await response.write(bytes([byte]))
        return response

    async with serving(FakeServer(cut)) as url:
        done = await run(url, load(requests=1))
    (answer,) = done.answers
    assert (answer.ok, answer.text, answer.completion_tokens) == (True, "é", 1)


async def test_what_a_model_thinks_or_calls_counts_as_tokens():
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"tool_calls": [{"index": 0}]},
        {"content": "a"},
    ]

    async def thinking(request, body):
        response = web.StreamResponse()
        await response.prepare(request)
        for delta in deltas:
            await send(response, {"choices": [{"delta": delta, "finish_reason": None}]})
        await send(response, {"choices": [{"delta": {}, "finish_reason": "stop"}]})
        return response

    async with serving(FakeServer(thinking)) as url:
        done = await run(url, load(requests=1), endpoint="chat")
    (answer,) = done.answers
    assert len(answer.times) == 4
    assert (answer.text, answer.finish_reason) == ("a", "stop")


async def test_a_pair_of_seeds_sends_the_same_and_other_work():
    async def prompts(seed: int):
        fake = FakeServer()
        async with serving(fake) as url:
            await run(url, load(seed=seed, concurrency=1))
        return [body["prompt"] for body in fake.bodies]

    first = await prompts(1)
    assert first == await prompts(1)
    assert not set(first) & set(await prompts(2))
