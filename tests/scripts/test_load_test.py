"""The load test against a server that answers from a script."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from scripts import _client as client
from scripts import load_test
from tests.scripts.fake_openai import FakeServer, send, serving


def some_load(**changes):
    given: dict[str, Any] = {"requests": 12, "concurrency": 3, "rate": None, "seed": 1}
    given |= {"prompt_tokens": "5:9", "output_tokens": "4"}
    return load_test.Load(**{**given, **changes})


async def run(url: str, load=None, **target):
    bar = load_test.ProgressBar(1000, visible=False)
    made = client.Target(url, target.pop("model", ""), **target)
    return await load_test.run_load(made, load or some_load(), bar)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_counts_tokens_requests_and_times_of_a_closed_loop(endpoint):
    fake = FakeServer()
    async with serving(fake) as url:
        summary = await run(url + "v1", endpoint=endpoint)
    assert summary["model"] == "fake"
    assert (summary["requests"], summary["completed"], summary["errors"]) == (12, 12, {})
    assert summary["output_tokens"] == 48
    assert summary["prompt_tokens"] == 84
    assert summary["cached_tokens"] == 36
    assert summary["short_answers"] == summary["usage_missing"] == 0
    assert fake.most_running == 3
    assert 0 < summary["ttft_ms"]["p50"] <= summary["e2e_ms"]["p50"] <= summary["e2e_ms"]["max"]
    assert summary["output_tokens_per_s"] == pytest.approx(48 / summary["wall_s"], rel=0.01)


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
        summary = await run(url, some_load(requests=6, concurrency=None, rate=500.0))
    assert summary["completed"] == 6
    assert fake.most_running == 6


async def test_failures_are_counted_by_kind_and_do_not_end_the_run():
    async def fail_some(request, body):
        number = len(fake.bodies)
        if number % 4 == 1:
            return web.json_response({"error": {"message": "too many"}}, status=503)
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
        summary = await run(url, some_load(concurrency=1))
    assert summary["completed"] == 3
    assert {text.partition(":")[0]: n for text, n in summary["errors"].items()} == {
        "HTTP 503": 3,
        "ValueError": 3,
        "the stream ended without a token": 3,
    }
    assert "3 failed: HTTP 503" in load_test.table(summary)


async def test_missing_usage_is_replaced_by_counting_chunks():
    async def without_usage(request, body):
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(2):
            await send(response, {"choices": [{"text": "a", "finish_reason": None}]})
        return response

    async with serving(FakeServer(without_usage)) as url:
        summary = await run(url)
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
        summary = await run(url, some_load(requests=1))
    assert (summary["completed"], summary["output_tokens"]) == (1, 1)


async def test_same_seed_sends_the_same_work_and_another_seed_other_prompts():
    async def prompts(seed: int):
        fake = FakeServer()
        async with serving(fake) as url:
            await run(url, some_load(seed=seed, concurrency=1))
        return [body["prompt"] for body in fake.bodies]

    first = await prompts(1)
    assert first == await prompts(1)
    assert not set(first) & set(await prompts(2))
    assert all(5 <= len(text.split()) <= 9 for text in first)


@pytest.mark.parametrize(
    ("spec", "low", "high", "mean"),
    [("128", 128, 128, 128), ("64:256", 64, 256, 160), ("~100", 1, 10_000, 100)],
)
def test_lengths_have_the_mean_and_bounds_of_their_spec(spec, low, high, mean):
    rng = random.Random(3)
    drawn = [load_test.Lengths(spec).draw(rng) for _ in range(4000)]
    assert low <= min(drawn)
    assert max(drawn) <= high
    assert np.mean(drawn) == pytest.approx(mean, rel=0.06)


@pytest.mark.parametrize("spec", ["", "0", "8:4", "1:2:3", "~1:2", "many", "-3"])
def test_a_bad_length_is_refused_before_anything_is_sent(spec, capsys):
    with pytest.raises(SystemExit):
        load_test.parse(["--prompt-tokens", spec])
    assert "--prompt-tokens" in capsys.readouterr().err


@pytest.mark.parametrize("percent", [0, 1, 50, 90, 99, 100])
def test_percentile_is_numpys(percent):
    values = list(np.random.default_rng(1).normal(size=37))
    expected = np.percentile(values, percent)
    assert client.percentile(values, percent) == pytest.approx(expected)


def test_nothing_has_no_percentile():
    assert client.percentile([], 50) is None
    assert client.spread_ms([]) is None


def test_no_server_is_exit_status_2(unused_tcp_port, capsys):
    assert load_test.main(["--base-url", f"http://127.0.0.1:{unused_tcp_port}"]) == 2
    assert str(unused_tcp_port) in capsys.readouterr().err
