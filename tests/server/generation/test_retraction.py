"""A pool too small for what runs: retracted requests answer as if nothing had happened."""

from __future__ import annotations

import asyncio
import json

from tests.fakes import fake_runner, fake_server


async def test_retracted_requests_give_every_token_once_with_its_logprob():
    # Room for six prompts with their first tokens, not for their outputs.
    runner = fake_runner(max_total_tokens=16 * 40)
    options = {"schedule_conservativeness": 0.0, "chunked_prefill_size": 256}
    async with asyncio.timeout(60), fake_server(runner=runner, scheduler=options) as server:
        prompts = [f"{i}" * 40 for i in range(6)]
        limit = 120
        asked = [
            server.events(
                "/v1/completions",
                {"prompt": p, "max_tokens": limit, "logprobs": 1, "ignore_eos": True},
            )
            for p in prompts
        ]
        streams = await asyncio.gather(*asked)
        await server.wait_idle()
        assert server.service.engine.scheduler.statistics().counters.retractions > 0
        for prompt, events in zip(prompts, streams, strict=True):
            choices = [json.loads(event)["choices"][0] for event in events[:-1]]
            start = sum(prompt.encode()) % 26
            wanted = "".join(chr(ord("a") + (start + i) % 26) for i in range(limit))
            assert "".join(choice["text"] for choice in choices) == wanted
            tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
            assert "".join(tokens) == wanted
            assert choices[-1]["finish_reason"] == "length"
