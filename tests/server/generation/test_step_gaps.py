"""Long prompts among running streams: the streams keep getting tokens, read from step records.

Times are the records' own: the longest gap between two tokens of a stream is compared with the
longest mixed step of the same run, so the machine's speed and load do not matter.
"""

from __future__ import annotations

import asyncio
import itertools

from tests.fakes import fake_runner, fake_server

STREAMS = 8
PROMPTS = 4
PROMPT_TOKENS = 1500
CHUNK = 128


def step_seconds(batch) -> float:
    """A step whose time grows with its tokens, as a CPU's does."""
    return 0.0002 + 2e-5 * sum(batch.extend_lens)


async def test_streams_get_a_token_in_every_step_while_prompts_are_cut():
    options = {"chunked_prefill_size": CHUNK, "max_running_requests": 16}
    runner = fake_runner(step_seconds=step_seconds)
    async with asyncio.timeout(60), fake_server(runner=runner, scheduler=options) as server:
        engine = server.service.engine
        streams = [
            asyncio.create_task(server.complete(f"stream {i}", max_tokens=200))
            for i in range(STREAMS)
        ]
        while engine.scheduler.counters.output_tokens < 4 * STREAMS:  # noqa: ASYNC110
            await asyncio.sleep(0)
        ids = {record.request_id for record in engine.scheduler.requests}
        prompts = [
            asyncio.create_task(server.complete(f"{i}" + "x" * PROMPT_TOKENS, max_tokens=4))
            for i in range(PROMPTS)
        ]
        await asyncio.gather(*streams, *prompts)
        records = list(engine.records)

    mixed = [r for r in records if r.kind == "mixed" and r.prefill_tokens > CHUNK // 2]
    assert len(mixed) >= PROMPTS * PROMPT_TOKENS // CHUNK
    assert all(r.prefill_tokens <= CHUNK for r in mixed)
    # Every stream that runs has a row in every mixed step of the long prompts.
    for record in mixed:
        assert ids - ended_before(records, record.step) <= set(record.decode_ids)
    longest = max(r.done_s - r.launched_s for r in mixed)
    for request_id in ids:
        times = [r.done_s for r in records if request_id in r.decode_ids + r.prefill_ids]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert max(gaps) <= 3 * longest


def ended_before(records, step) -> set[str]:
    """Requests that no step from this one on names."""
    alive = {i for r in records if r.step >= step for i in r.decode_ids + r.prefill_ids}
    seen = {i for r in records for i in r.decode_ids + r.prefill_ids}
    return seen - alive
