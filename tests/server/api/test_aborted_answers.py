"""An answer that was aborted, or could not be gone on with, says so in each protocol's own words."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.fakes import fake_runner, fake_server

MESSAGES = [{"role": "user", "content": "Count"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 900},
    "/v1/completions": {"prompt": "Count", "max_tokens": 900},
    "/v1/responses": {"input": "Count", "max_output_tokens": 900},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 900},
    "/generate": {"text": "Count", "sampling_params": {"max_new_tokens": 900}},
}


def unfinished(path, last):
    """Whether the last word of a stream, or a whole body, says so."""
    if path == "/v1/responses":
        found = last.get("response", last)
        return found["status"] == "incomplete" and found["incomplete_details"] == {"reason": None}
    if path == "/v1/messages":
        return last.get("delta", last)["stop_reason"] == "pause_turn"
    if path == "/generate":
        wanted = {"type": "abort", "message": "aborted by request"}
        return last["meta_info"]["finish_reason"] == wanted
    return last["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("path", ROUTES)
async def test_aborted_streams(path):
    async with fake_server() as server:
        body = {**ROUTES[path], "stream": True, "request_id": "mine"}
        async with server.client.post(server.url + path, json=body) as answer:
            await answer.content.readline()
            await server.post("/abort_request", {"rid": "mine"})
            lines = (await answer.read()).decode().splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        last = [one for one in events if one.get("type") != "message_stop"][-1]
        assert unfinished(path, last), last


@pytest.mark.parametrize("path", ROUTES)
async def test_aborted_whole_answers(path):
    async with fake_server() as server:
        asked = asyncio.create_task(server.post(path, {**ROUTES[path], "request_id": "mine"}))
        while not server.service.generator.live:  # noqa: ASYNC110 (nothing tells)
            await asyncio.sleep(0)
        assert server.service.generator.abort("mine") == 1
        status, body = await asked
        assert status == 200
        assert unfinished(path, body), body


async def stopped(server):
    await server.service.engine.stop()


async def dead(server):
    def plan(now):
        raise ZeroDivisionError("secret detail")

    server.service.engine.scheduler.plan = plan


async def nothing(server):
    """The request's own time-out comes."""


BREAKS: dict[str, tuple[Any, dict[str, Any], int, str]] = {
    "the server stops": (stopped, {}, 503, "the server is stopping"),
    "the engine dies": (dead, {}, 503, "the engine has stopped"),
    "its time is up": (nothing, {"timeout": 0.2}, 504, "timed out"),
}


def slow_server():
    return fake_server(runner=fake_runner(step_seconds=lambda batch: 0.002))


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("why", BREAKS)
async def test_streams_that_break_end_with_an_error_and_never_look_finished(path, why):
    happens, more, _, told = BREAKS[why]
    async with slow_server() as server:
        body = {**ROUTES[path], "stream": True, **more}
        async with server.client.post(server.url + path, json=body) as answer:
            assert answer.status == 200
            await answer.content.readline()
            await happens(server)
            text = (await answer.read()).decode()
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    last = events[-1]
    error = last["response"]["error"] if path == "/v1/responses" else last["error"]
    assert told in error["message"].lower()
    assert "secret" not in text
    for ending in ("[DONE]", "message_stop", "message_delta", "response.completed", "incomplete"):
        assert f'"type":"{ending}"' not in text
        assert f"data: {ending}" not in text
    for one in events:
        assert not any(choice["finish_reason"] for choice in one.get("choices", ()))
        assert not one.get("meta_info", {}).get("finish_reason")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("why", BREAKS)
async def test_whole_answers_that_break_are_errors(path, why):
    happens, more, wanted, told = BREAKS[why]
    async with slow_server() as server:
        asked = asyncio.create_task(server.post(path, {**ROUTES[path], **more}))
        while not server.service.generator.live:  # noqa: ASYNC110 (nothing tells)
            await asyncio.sleep(0)
        await happens(server)
        status, body = await asked
    assert status == wanted
    assert told in body["error"]["message"].lower()
