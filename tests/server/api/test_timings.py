"""Where a request's time has gone, as each protocol's answer and the access log tell it."""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from contextlib import contextmanager
from typing import Any

import pytest

from runtime.request import Request, SamplingParams
from server.generation.timeline import Timeline, timings
from tests.fakes import IM_END, fake_runner, fake_server

STEP_S = 0.02
HEADER = {"X-Loomserve-Timings": "1"}
MESSAGES = {"messages": [{"role": "user", "content": "hello"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**MESSAGES, "max_tokens": 5},
    "/v1/completions": {"prompt": "hello", "max_tokens": 5},
    "/v1/responses": {"input": "hello", "max_output_tokens": 5},
    "/v1/messages": {**MESSAGES, "max_tokens": 5},
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 5}},
}
OPENAI = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


def timings_of(path, body):
    """At the place where the protocol's usage is."""
    return body["meta_info"].get("timings") if path == "/generate" else body.get("timings")


async def streamed(server, path, body, headers=None):
    """The JSON of every event."""
    options = {"json": {**body, "stream": True}, "headers": headers or {}}
    async with server.client.post(server.url + path, **options) as answer:
        assert answer.status == 200, await answer.text()
        lines = (await answer.text()).splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


@contextmanager
def access_lines():
    """The lines of the access log."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("loomserve.access")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


def adds_up(told):
    """The parts of a request that was never retracted are its time to the first token."""
    parts = told["tokenize_s"] + told["queued_s"] + told["prefill_s"]
    assert parts == pytest.approx(told["first_token_s"], abs=5e-6)
    assert sum(told["waited_s"].values()) == pytest.approx(told["queued_s"], abs=2e-5)
    assert told["first_token_s"] + told["decode_s"] == pytest.approx(told["total_s"], abs=5e-6)


@pytest.mark.parametrize("path", BODIES)
async def test_the_header_gives_timings_whole_and_streamed(path):
    async with fake_server() as server:
        status, plain = await server.post(path, BODIES[path])
        assert (status, timings_of(path, plain)) == (200, None)
        _, answer = await server.post(path, BODIES[path], headers={"X-Loomserve-Timings": "0"})
        assert timings_of(path, answer) is None
        status, answer = await server.post(path, BODIES[path], headers=HEADER)
        assert status == 200
        adds_up(timings_of(path, answer))
        for event in await streamed(server, path, BODIES[path]):
            assert '"timings"' not in json.dumps(event)
        events = await streamed(server, path, BODIES[path], HEADER)
    told = [event for event in events if '"timings"' in json.dumps(event)]
    assert len(told) == 1, "once, at the end"
    last = told[0]
    if path == "/v1/responses":
        assert last["type"] == "response.incomplete"
        last = last["response"]
        assert "usage" in last
    if path == "/v1/messages":
        assert last["type"] == "message_delta"
        assert "usage" in last
    adds_up(timings_of(path, last))


@pytest.mark.parametrize("path", OPENAI)
async def test_stream_options_ask_for_timings(path):
    asking = {**BODIES[path], "stream_options": {"include_timings": True}}
    async with fake_server() as server:
        _, answer = await server.post(path, asking)
        adds_up(answer["timings"])
        events = await streamed(server, path, asking)
        last = events[-1]["response"] if path == "/v1/responses" else events[-1]
        adds_up(last["timings"])
        if path != "/v1/responses":
            assert last["choices"] == []
            assert "usage" not in last
            both = {**asking, "stream_options": {"include_timings": True, "include_usage": True}}
            assert {"timings", "usage"} <= (await streamed(server, path, both))[-1].keys()
        wrong = {**BODIES[path], "stream_options": {"include_timings": 7}}
        status, refused = await server.post(path, wrong)
        assert (status, refused["error"]["param"]) == (400, "stream_options.include_timings")


@pytest.mark.parametrize("path", BODIES)
async def test_a_wrong_header_is_refused_by_name(path):
    async with fake_server() as server:
        status, body = await server.post(path, BODIES[path], headers={"X-Loomserve-Timings": "yes"})
        await server.wait_idle()
    assert status == 400
    assert body["error"]["message"] == "X-Loomserve-Timings: got 'yes', must be 0 or 1"


async def test_times_are_those_of_the_steps():
    """A prompt of 3 chunks, and 6 tokens: 3 steps to the first, 5 more to the last; a request
    behind it in a batch of one waits for all 8 of them."""
    runner = fake_runner(step_seconds=lambda batch: STEP_S)
    options = {"chunked_prefill_size": 64, "max_running_requests": 1}
    async with fake_server(runner=runner, scheduler=options) as server:
        body = {"prompt": "x" * 150, "max_tokens": 6, "ignore_eos": True, "temperature": 0}
        first = asyncio.create_task(server.post("/v1/completions", body, headers=HEADER))
        while not server.service.engine.scheduler.statistics().active:  # noqa: ASYNC110
            await asyncio.sleep(0)
        _, second = await server.post("/v1/completions", body, headers=HEADER)
        _, first = await first
    first, second = first["timings"], second["timings"]
    assert first["prefill_chunks"] == 3
    assert first["prefill_s"] >= 3 * STEP_S
    assert first["decode_s"] >= 5 * STEP_S * 0.9
    assert first["cached_tokens"] == 0
    assert second["waited_s"]["rows"] >= 7 * STEP_S
    assert second["queued_s"] >= second["waited_s"]["rows"]
    assert second["cached_tokens"] >= 128
    assert second["prefill_chunks"] == 1
    adds_up(first)
    adds_up(second)


async def test_several_choices_tell_of_the_longest_and_count_all():
    async with fake_server() as server:
        body = {"prompt": "abc", "n": 3, "max_tokens": 4, "ignore_eos": True}
        _, answer = await server.post("/v1/completions", body, headers=HEADER)
        told = answer["timings"]
        assert told["prefill_chunks"] == 3
        assert told["cached_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        native = {"text": ["ab", "cd"], "sampling_params": {"max_new_tokens": 2}}
        _, answers = await server.post("/generate", native, headers=HEADER)
    assert [one["meta_info"]["timings"]["prefill_chunks"] for one in answers] == [1, 1]


async def test_a_retracted_request_says_so_and_waits_in_its_decoding():
    """More requests than there are pages for: some give way, and are prefilled again."""
    runner = fake_runner(max_total_tokens=16 * 40)
    options = {"schedule_conservativeness": 0.0, "chunked_prefill_size": 256}
    async with fake_server(runner=runner, scheduler=options) as server:
        body = {"max_tokens": 120, "ignore_eos": True}
        found = await asyncio.gather(
            *(
                server.post("/v1/completions", {**body, "prompt": f"{i}" * 40}, headers=HEADER)
                for i in range(6)
            )
        )
        await server.wait_idle()
    told = [answer["timings"] for status, answer in found if status == 200]
    assert len(told) == 6
    assert sum(one["retractions"] for one in told) >= 1
    for one in told:
        assert one["prefill_chunks"] >= 1 + one["retractions"]
        parts = one["tokenize_s"] + one["queued_s"] + one["prefill_s"]
        assert parts == pytest.approx(one["first_token_s"], abs=5e-6)
        if one["retractions"]:
            assert sum(one["waited_s"].values()) > one["queued_s"]


async def test_the_access_log_has_the_same_in_its_line():
    with access_lines() as lines:
        async with fake_server(access_log=True) as server:
            _, answer = await server.post("/v1/completions", BODIES["/v1/completions"])
            _, timed = await server.post(
                "/v1/completions", BODIES["/v1/completions"], headers=HEADER
            )
            await server.get("/health")
            await server.post("/v1/completions", {"prompt": 7})
            await server.wait_idle()
    plain, asked, health, refused = map(json.loads, lines)
    assert plain["timings"].keys() == timed["timings"].keys()
    assert asked["timings"] == timed["timings"]
    assert plain["completion_tokens"] == answer["usage"]["completion_tokens"]
    assert asked["prompt_tokens"] == timed["usage"]["prompt_tokens"]
    assert asked["seconds"] >= asked["timings"]["total_s"] - 1e-4
    assert "timings" not in health
    assert (refused["status"], "timings" in refused) == (400, False)


async def test_a_client_that_leaves_is_in_the_access_log_with_what_it_got():
    with access_lines() as lines:
        runner = fake_runner(step_seconds=lambda batch: STEP_S)
        async with fake_server(access_log=True, runner=runner) as server:
            body = {"prompt": "abc", "max_tokens": 500, "ignore_eos": True, "stream": True}
            async with server.client.post(server.url + "/v1/completions", json=body) as answer:
                await answer.content.readline()
            await server.wait_idle()
    (line,) = map(json.loads, lines)
    assert line["timings"]["first_token_s"] >= STEP_S
    assert line["timings"]["total_s"] < 500 * STEP_S
    assert 0 < line["completion_tokens"] < 500


def test_what_never_came_is_none_not_zero():
    request = Request("r", array("i", [IM_END]), SamplingParams(), arrival_s=1.5)
    timeline = Timeline(request, received_s=1.0)
    timeline.end(4.0, 0, {"rows": 2.0})
    told = timings([timeline], 0, now=9.0)
    assert (told.first_token_s, told.prefill_s, told.decode_s) == (None, None, None)
    assert (told.tokenize_s, told.queued_s, told.total_s) == (0.5, 2.0, 3.0)
