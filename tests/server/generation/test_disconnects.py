"""Clients that leave, at any moment: what they held is given back, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from aiohttp import ClientConnectionError, ClientSession, TCPConnector

from tests.effort import tries
from tests.fakes import fake_runner, fake_server, live


async def use_and_leave(client: ClientSession, url: str, rng: random.Random) -> str:
    """One request of random shape; leaves at a random moment or stays. "left" or "done"."""
    size, limit = rng.choice([1, 20, 150, 700]), rng.randint(1, 60)
    body: dict[str, Any] = {
        "prompt": [rng.randrange(200) for _ in range(size)],
        "max_tokens": limit,
    }
    body |= {"stream": rng.random() < 0.7, "n": rng.choice([1, 1, 1, 2]), "ignore_eos": True}
    leaves = rng.random() < 0.5
    after = rng.randint(0, limit)
    try:
        async with client.post(url + "/v1/completions", json=body) as answer:
            assert answer.status == 200
            if not body["stream"]:
                if leaves:
                    return "left"
                found = await answer.json()
                assert found["usage"]["completion_tokens"] == limit * body["n"]
                return "done"
            events = []
            async for line in answer.content:
                if line.startswith(b"data:"):
                    events.append(line[6:].strip())
                if leaves and len(events) > after:
                    return "left"
            assert events[-1] == b"[DONE]"
            text = "".join(
                choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"]
            )
            # Scripted tokens are one-byte characters.
            assert len(text) == limit * body["n"]
            return "done"
    except (ClientConnectionError, TimeoutError):
        assert leaves
        return "left"


@pytest.mark.parametrize("disable_overlap", [False, True], ids=["overlap", "no-overlap"])
async def test_requests_with_random_disconnects_give_everything_back(disable_overlap):
    rng, count = random.Random(500), tries(500)
    runner = fake_runner(max_total_tokens=8192)
    options = {"max_running_requests": 24, "chunked_prefill_size": 128}
    async with (
        asyncio.timeout(110),
        fake_server(runner=runner, scheduler=options, disable_overlap=disable_overlap) as server,
    ):
        limit = asyncio.Semaphore(48)

        async def one() -> str:
            # A connection of its own, so that leaving closes it.
            async with limit, ClientSession(connector=TCPConnector(force_close=True)) as client:
                return await use_and_leave(client, server.url, rng)

        outcomes = await asyncio.gather(*(one() for _ in range(count)))
        assert count / 5 < outcomes.count("left") < count * 4 / 5
        await server.wait_idle()
        counters = server.service.engine.scheduler.statistics().counters
        assert counters.chunks > counters.admitted  # prompts were cut
        assert set(counters.finished) <= {"stop", "length", "abort"}
        assert counters.finished["abort"] > 0
        assert live(server.service) == 0
        await server.complete(max_tokens=3)


async def test_leaving_at_the_very_end_of_an_answer_is_harmless():
    async with fake_server() as server:
        for i in range(40):
            body = {"prompt": "count", "max_tokens": 4, "stream": True}
            async with (
                ClientSession() as client,
                client.post(server.url + "/v1/completions", json=body) as answer,
            ):
                for _ in range(i % 4 + 1):
                    await answer.content.readuntil(b"\n\n")
        await server.wait_idle()
        await server.complete(max_tokens=2)
        ended = server.service.engine.scheduler.statistics().counters.finished
        assert sum(ended.values()) == 41
        assert set(ended) <= {"stop", "length", "abort"}


async def test_leaving_while_the_prompt_is_being_cut_gives_its_chunks_back():
    slow = fake_runner(step_seconds=lambda batch: 0.005)
    async with asyncio.timeout(20), fake_server(runner=slow) as server:
        asked = asyncio.create_task(server.complete("z" * 1500, max_tokens=5))
        scheduler = server.service.engine.scheduler
        while not scheduler.statistics().counters.chunks:  # noqa: ASYNC110
            await asyncio.sleep(0)
        asked.cancel()
        await server.wait_idle()
        assert scheduler.statistics().counters.chunks < 1500 // 64


async def test_leaving_while_a_whole_answer_is_generated_ends_it():
    slow = fake_runner(step_seconds=lambda batch: 0.002)
    async with asyncio.timeout(20), fake_server(runner=slow) as server:
        asked = asyncio.create_task(server.complete("z", max_tokens=1500))
        counters = server.service.engine.scheduler.counters
        while not counters.output_tokens:  # noqa: ASYNC110
            await asyncio.sleep(0)
        asked.cancel()
        await server.wait_idle()
        assert counters.finished == {"abort": 1}
        assert counters.output_tokens < 1500
