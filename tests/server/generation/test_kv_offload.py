"""The engine over a tier: copies and loads beside steps, over HTTP, on a device without KV."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np

from runtime.offload.page_store import PageStore
from tests.fakes import FakeServer, fake_runner, fake_server, make_fake_service

PAGE_BYTES = 64
PROMPT = "a" * 400
OTHERS = ["b" * 500, "c" * 500]


class Pool:
    """Pages without content."""

    page_bytes = PAGE_BYTES
    written = 0
    broken = False

    def __init__(self) -> None:
        self.readable = threading.Event()
        self.readable.set()

    def read(self, pages: Sequence[int]) -> np.ndarray:
        assert self.readable.wait(timeout=30)
        return np.zeros((len(pages), PAGE_BYTES), np.uint8)

    def write(self, pages: Sequence[int], kv: np.ndarray) -> None:
        if self.broken:
            raise RuntimeError("a copy failed")
        self.written += len(pages)


@asynccontextmanager
async def served(pool: Pool, tokens: int = 800) -> AsyncIterator[FakeServer]:
    service = make_fake_service(
        fake_runner(max_total_tokens=tokens),
        tier=PageStore(pool, 1000),
        scheduler={"kv_tier_pages": 1000},
    )
    async with fake_server(service) as server:
        yield server


async def complete(server: FakeServer, prompt: str) -> tuple[str, int]:
    """The answer's text, and how much of the prompt was cached."""
    body = await server.complete(prompt, max_tokens=8)
    usage = body["usage"]["prompt_tokens_details"]
    return body["choices"][0]["text"], usage["cached_tokens"]


async def copied(server: FakeServer, pages: int) -> None:
    """So many pages are in the tier."""
    scheduler = server.service.engine.scheduler
    async with asyncio.timeout(30):
        while scheduler.counters.stored_pages < pages:
            await complete(server, "short")


async def test_an_evicted_conversation_comes_back_by_a_load() -> None:
    pool = Pool()
    async with served(pool) as server:
        text, cached = await complete(server, PROMPT)
        assert cached == 0
        await copied(server, 25)
        for other in OTHERS:
            await complete(server, other)
        again, cached = await complete(server, PROMPT)
        assert (again, cached) == (text, 384)
        assert pool.written > 0
        await server.wait_idle()


async def test_a_load_that_fails_costs_time_and_nothing_else() -> None:
    pool = Pool()
    async with served(pool) as server:
        text, _ = await complete(server, PROMPT)
        await copied(server, 25)
        for other in OTHERS:
            await complete(server, other)
        pool.broken = True
        again, cached = await complete(server, PROMPT)
        assert again == text
        assert cached < 384
        assert server.service.engine.scheduler.counters.failed_loads == 1
        await server.wait_idle()


async def test_a_flush_empties_the_tier_too() -> None:
    pool = Pool()
    async with served(pool) as server:
        await complete(server, PROMPT)
        await copied(server, 25)
        await server.wait_idle()
        assert server.service.engine.flush_cache()
        _, cached = await complete(server, PROMPT)
        assert cached == 0
        assert pool.written == 0


async def test_a_server_that_stops_keeps_what_was_finished() -> None:
    """More than one copy holds, none of which is done before it is told to stop."""
    pool = Pool()
    async with served(pool, tokens=4000) as server:
        engine = server.service.engine
        stop_engine = engine.stop
        pool.readable.clear()
        await complete(server, "a" * 1500)
        scheduler = engine.scheduler
        assert scheduler.counters.stored_pages == 0

        async def stop() -> None:
            pool.readable.set()  # of a copy the loop hears after it was told to stop: nobody waits
            await stop_engine()

        engine.stop = stop
    assert scheduler.counters.stored_pages == (1500 + 8 - 1) // 16
    assert not scheduler.copies_pending
