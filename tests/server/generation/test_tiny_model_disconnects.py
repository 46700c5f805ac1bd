"""Random disconnects against a real model in a process of its own: the books balance afterwards."""

from __future__ import annotations

import asyncio
import random

import pytest
from aiohttp import ClientSession, TCPConnector

from tests.process.server_process import ServerProcess, write_tiny_model

pytestmark = pytest.mark.slow


async def use(url: str, rng: random.Random, limit: asyncio.Semaphore) -> str:
    size, tokens = rng.choice([1, 20, 150, 500]), rng.randint(1, 40)
    body = {"prompt": [rng.randrange(3, 250) for _ in range(size)], "max_tokens": tokens}
    body |= {"ignore_eos": True, "stream": True}
    leaves, after = rng.random() < 0.5, rng.randrange(tokens)
    connector = TCPConnector(force_close=True)
    async with (
        limit,
        ClientSession(connector=connector) as client,
        client.post(url + "/v1/completions", json=body) as answer,
    ):
        assert answer.status == 200
        events = 0
        async for line in answer.content:
            events += line.startswith(b"data:")
            if leaves and events > after:
                return "left"
            if line == b"data: [DONE]\n":
                return "done"
        raise AssertionError("the stream ended without [DONE]")


async def statistics(client: ClientSession, url: str) -> dict:
    async with client.get(url + "/server_info") as answer:
        return (await answer.json())["statistics"]


async def test_everything_is_given_back_after_random_disconnects(tmp_path):
    model = write_tiny_model(tmp_path / "tiny-llama")
    options = ("--port", "0", "--cpu-kernels", "torch", "--chunked-prefill-size", "64")
    with ServerProcess("--model", str(model), *options) as server:
        url = server.url()
        rng, limit = random.Random(60), asyncio.Semaphore(16)
        outcomes = await asyncio.gather(*(use(url, rng, limit) for _ in range(60)))
        assert {"left", "done"} == set(outcomes)
        async with asyncio.timeout(60), ClientSession() as client:
            found = await statistics(client, url)
            while found["running"] + found["prefilling"] + found["waiting"] + found["in_flight"]:
                found = await statistics(client, url)
        balance = found["free_tokens"] + found["cached_tokens"] + found["reserved_tokens"]
        assert balance == found["capacity_tokens"]
        assert found["private_tokens"] == found["protected_tokens"] == 0
        assert found["free_rows"] == 256
        assert found["invariant_error"] is None
        server.terminate()
        assert server.exit_status() == 0
