#!/usr/bin/env python
"""What it costs a server that somebody watches it: tokens per second with and without a reader of
/debug/live, in pairs.

    python scripts/bench_watching.py                                   steps that take no time
    python scripts/bench_watching.py --base-url http://127.0.0.1:8000  a running server

Without an address the model is simulated and its steps take no time, so that what a sample takes
from the server shows at its largest. Client and reader then share its process, and seconds are of
processor time, which other work on the machine changes little. Each pair runs the same requests
twice, in changing order; the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fakes import fake_server, make_fake_service


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", help="a running server (default: a simulated one)")
    parser.add_argument("--streams", type=int, default=64, help="requests at once")
    parser.add_argument("--tokens", type=int, default=400, help="of each answer")
    parser.add_argument("--pairs", type=int, default=8)
    options = parser.parse_args()
    clock = time.process_time if options.base_url is None else time.perf_counter
    load = clock, options.streams, options.tokens
    async with (
        server_at(options.base_url, options.streams) as url,
        aiohttp.ClientSession() as client,
    ):
        await run(client, url, *load)
        pairs = []
        for number in range(options.pairs):
            rates = {}
            for watched in (number % 2 == 0, number % 2 == 1):
                async with reading(client, url) if watched else nullcontext():
                    rates[watched] = await run(client, url, *load)
            pairs.append(rates)
            ratio = rates[True] / rates[False]
            print(f"{rates[False]:10,.0f} tokens/s  {rates[True]:10,.0f} watched  {ratio:.3f}")
    ratios = [rates[True] / rates[False] for rates in pairs]
    found = {
        "streams": options.streams,
        "tokens_s": round(statistics.median(rates[False] for rates in pairs), 1),
        "tokens_s_watched": round(statistics.median(rates[True] for rates in pairs), 1),
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_least": round(min(ratios), 4),
        "ratio_most": round(max(ratios), 4),
    }
    print(json.dumps(found))


@asynccontextmanager
async def server_at(url: str | None, streams: int) -> AsyncIterator[str]:
    if url is not None:
        yield url.rstrip("/")
        return
    service = make_fake_service(scheduler={"max_running_requests": streams})
    async with fake_server(service) as server:
        yield server.url


@asynccontextmanager
async def reading(client: aiohttp.ClientSession, url: str) -> AsyncIterator[None]:
    """Somebody reads the samples inside the block."""

    async def read() -> None:
        async with client.get(f"{url}/debug/live") as answer:
            answer.raise_for_status()
            async for _ in answer.content.iter_any():
                pass

    reader = asyncio.create_task(read())
    try:
        yield
        if reader.done():
            raise RuntimeError("the reader was not served") from reader.exception()
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


async def run(
    client: aiohttp.ClientSession,
    url: str,
    clock: Callable[[], float],
    streams: int,
    tokens: int,
) -> float:
    """Output tokens per second of so many requests at once."""

    async def one(number: int) -> None:
        body = {
            "prompt": f"{number} is a number, and",
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        async with client.post(f"{url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            await answer.read()

    begin = clock()
    await asyncio.gather(*(one(number) for number in range(streams)))
    return streams * tokens / (clock() - begin)


if __name__ == "__main__":
    asyncio.run(main())
