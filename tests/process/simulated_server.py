"""A server whose model is simulated, in a process of its own: prints its address, and serves."""

from __future__ import annotations

import asyncio

import uvloop

from server.launcher import calm_interpreter
from tests.fakes import byte_tokenizer, fake_runner, fake_server, make_fake_service
from tests.server.server_kit import CHATML_TOOLS


async def main() -> None:
    tokenizer = byte_tokenizer(CHATML_TOOLS)
    service = make_fake_service(
        fake_runner(max_total_tokens=400_000),
        tokenizer,
        context_length=8192,
        scheduler={"chunked_prefill_size": 2048},
    )
    async with fake_server(service) as server:
        print(f"loomserve is ready on {server.url}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    calm_interpreter()
    uvloop.run(main())
