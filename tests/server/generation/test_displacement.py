"""Who has to make room in a full queue, and what it is told."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.fakes import BODIES, fake_runner, fake_server

# One runs, so many wait; nobody is put back from running for a higher priority.
FULL = {"max_running_requests": 1, "max_queued_requests": 2, "disable_priority_preemption": True}


class Crowd:
    """A server whose only place is taken by an answer that goes on until it is aborted."""

    def __init__(self, server) -> None:
        self.server = server

    async def post(self, path, body, waiting):
        """Begins a request; returns when so many wait."""
        task = asyncio.create_task(self._answer(path, body))
        scheduler = self.server.service.engine.scheduler
        async with asyncio.timeout(20):
            # No event says "it waits": whatever has to happen happens between two turns.
            while scheduler.statistics().waiting != waiting or not scheduler.statistics().running:  # noqa: ASYNC110
                await asyncio.sleep(0)
        return task

    async def _answer(self, path, body):
        async with self.server.client.post(self.server.url + path, json=body) as answer:
            return answer.status, dict(answer.headers), await answer.text()


async def crowd(server):
    found = Crowd(server)
    body = {"prompt": "running", "max_tokens": 1500, "ignore_eos": True}
    running = await found.post("/v1/completions", body, waiting=0)
    return found, running


def slow_server(**scheduler):
    runner = fake_runner(step_seconds=lambda batch: 0.002)
    return fake_server(runner=runner, scheduler={**FULL, **scheduler})


async def displaced(path, streamed):
    """What one that waits, and has to make room, is told: status, headers, body."""
    async with slow_server(max_queued_requests=1) as server:
        found, running = await crowd(server)
        low = await found.post(path, {**BODIES[path], "stream": streamed}, waiting=1)
        high = {"prompt": "high", "max_tokens": 1, "priority": 5}
        newcomer = await found.post("/v1/completions", high, waiting=1)
        told = await low
        assert server.service.metrics.rejected == {"503": 1}
        await server.post("/abort_request", {"abort_all": True})
        await asyncio.gather(running, newcomer)
        await server.wait_idle()
    return told


@pytest.mark.parametrize("path", BODIES)
async def test_who_makes_room_is_told_to_come_back(path):
    status, headers, text = await displaced(path, streamed=False)
    assert status == 503
    assert int(headers["Retry-After"]) >= 1
    error = json.loads(text)["error"]
    assert error["type"] == "overloaded_error"
    assert "one of higher priority needed the place" in error["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_waits_gets_it_as_its_protocol_s_error_event(path):
    status, headers, text = await displaced(path, streamed=True)
    assert status == 200
    assert headers["Content-Type"].startswith("text/event-stream")
    *names, data = text.removesuffix("\n\n").split("\n")
    assert names == (["event: error"] if path in ("/v1/responses", "/v1/messages") else [])
    told = json.loads(data.removeprefix("data: "))
    assert told["error"]["type"] == "overloaded_error"
    assert "one of higher priority needed the place" in told["error"]["message"]
    if path == "/v1/messages":
        assert told["type"] == "error"
        return  # Anthropic's errors have a type and no code
    assert told["error"]["code"] == "overloaded"
    if path == "/v1/responses":
        assert (told["type"], told["code"]) == ("error", "overloaded")


async def test_a_stream_that_has_begun_gets_it_as_an_event():
    async with slow_server() as server:
        body = {"prompt": "both", "max_tokens": 1500, "ignore_eos": True, "n": 2, "stream": True}
        found = Crowd(server)
        async with server.client.post(server.url + "/v1/completions", json=body) as both:
            assert both.status == 200
            low = {"prompt": "low", "max_tokens": 1}
            other = await found.post("/v1/completions", low, waiting=2)
            body = {"prompt": "high", "max_tokens": 1, "priority": 5, "n": 2, "temperature": 1}
            newcomer = await found.post("/v1/completions", body, waiting=2)
            text = await both.text()
        last = json.loads(text.removesuffix("\n\n").rpartition("data: ")[2])
        assert last["error"]["code"] == "overloaded"
        assert "[DONE]" not in text
        assert (await other)[0] == 503
        assert (await newcomer)[0] == 200, "the place is free now"
        await server.wait_idle()


async def test_a_newcomer_that_does_not_get_in_displaces_nobody():
    async with slow_server() as server:
        found, running = await crowd(server)
        low = [
            await found.post("/v1/completions", {"prompt": f"low {i}", "max_tokens": 1}, waiting=i)
            for i in (1, 2)
        ]
        body = {"prompt": "three", "max_tokens": 5, "priority": 5, "n": 3, "temperature": 1}
        status, answer = await server.post("/v1/completions", body)
        assert status == 400, "three never fit into a queue of two"
        assert "at most 2" in answer["error"]["message"]
        assert server.service.engine.scheduler.statistics().waiting == 2
        server.service.engine.scheduler.check()
        running.cancel()
        assert [(await task)[0] for task in low] == [200, 200]
        await server.wait_idle()
