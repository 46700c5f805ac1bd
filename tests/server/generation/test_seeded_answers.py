"""The same seed gives the same text, whatever else runs, on the embedded model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import openai
import pytest

from tests.process.server_process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow
SEEDED = 24
OTHERS = 16
TOPICS = ("a river", "the sea", "an old map", "seven bridges", "a cat", "winter", "bread")


@pytest.fixture(scope="module", params=["auto", "float32"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """auto is bfloat16 where the CPU has it."""
    with ServerProcess("--port", "0", "--dtype", request.param) as process:
        yield process.url()


async def test_seeded_requests_alone_and_among_others_are_identical(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=300) as client:
        model = (await client.models.list()).data[0].id

        async def text(seed: int) -> str:
            prompt = f"Tell me about {TOPICS[seed % len(TOPICS)]}. " * (1 + seed % 9)
            answer = await client.completions.create(
                model=model, prompt=prompt, temperature=1.0, top_p=0.95, max_tokens=16, seed=seed
            )
            return answer.choices[0].text

        async def other(i: int) -> None:
            await client.completions.create(
                model=model, prompt=f"{i} " * (1 + 7 * i), temperature=1.3, max_tokens=24
            )

        alone = [await text(seed) for seed in range(SEEDED)]
        assert len(set(alone)) > SEEDED // 2  # not one answer over and over
        for _ in range(2):
            answers = await asyncio.gather(
                *map(text, range(SEEDED)), *(other(i) for i in range(OTHERS))
            )
            assert list(answers[:SEEDED]) == alone
