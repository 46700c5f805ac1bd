"""An answer that was aborted says, in each protocol's own words, that it is not finished."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.fakes import fake_server

MESSAGES = [{"role": "user", "content": "Count"}]
ROUTES = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 900},
    "/v1/completions": {"prompt": "Count", "max_tokens": 900},
    "/v1/responses": {"input": "Count", "max_output_tokens": 900},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 900},
}


def unfinished(path, last):
    """Whether the last word of a stream, or a whole body, says so."""
    if path == "/v1/responses":
        found = last.get("response", last)
        return found["status"] == "incomplete" and found["incomplete_details"] == {"reason": None}
    if path == "/v1/messages":
        return last.get("delta", last)["stop_reason"] == "pause_turn"
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
