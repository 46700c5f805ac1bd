"""The official client against a server on scripted tokens: streams, whole answers, typed errors."""

from __future__ import annotations

import openai
import pytest
from openai.types import CompletionUsage

from tests.fakes import fake_runner, fake_server, says
from tests.values import present


def client_of(server, key="unused") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


async def test_client_streams_chat_with_usage():
    async with (
        fake_server(runner=fake_runner(says("Hello, 世界!"))) as server,
        client_of(server) as client,
    ):
        stream = await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        text, reasons = "", []
        usage: CompletionUsage | None = None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
        assert text == "Hello, 世界!"
        assert reasons == ["stop"]
        assert present(usage).completion_tokens == len("Hello, 世界!".encode()) + 1


async def test_client_streams_completions():
    async with fake_server() as server, client_of(server) as client:
        stream = await client.completions.create(
            model="fake", prompt="abc", max_tokens=9, stream=True
        )
        streamed = "".join([c.text async for chunk in stream for c in chunk.choices])
        whole = await client.completions.create(model="fake", prompt="abc", max_tokens=9)
        assert streamed == whole.choices[0].text
        assert present(whole.usage).total_tokens == 12


async def test_client_reads_logprobs_and_choices():
    async with fake_server() as server, client_of(server) as client:
        answer = await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hi"}],
            n=2,
            max_tokens=5,
            logprobs=True,
            top_logprobs=4,
        )
        assert len(answer.choices) == 2
        for choice in answer.choices:
            entries = present(present(choice.logprobs).content)
            assert [len(entry.top_logprobs) for entry in entries] == [4] * 5


async def test_client_lists_and_retrieves_the_model():
    async with fake_server() as server, client_of(server) as client:
        assert [model.id async for model in client.models.list()] == ["fake"]
        assert (await client.models.retrieve("fake")).owned_by == "loomserve"


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"prompt": "x" * 3000}, openai.BadRequestError, "prompt"),
        ({"model": "other"}, openai.NotFoundError, "model"),
    ],
)
async def test_client_gets_typed_errors(fields, error, param):
    async with fake_server() as server, client_of(server) as client:
        with pytest.raises(error) as raised:
            await client.completions.create(
                **{"model": "fake", "prompt": "x", "max_tokens": 5, **fields}
            )
        assert raised.value.param == param


async def test_client_gets_authentication_errors():
    async with fake_server(api_key="sesame") as server:
        async with client_of(server, "wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with client_of(server, "sesame") as client:
            assert (await client.models.list()).data


async def test_client_raises_where_a_stream_breaks():
    async with (
        fake_server(runner=fake_runner(step_seconds=lambda batch: 0.01)) as server,
        client_of(server) as client,
    ):
        stream = await client.completions.create(
            model="fake", prompt="x", max_tokens=1500, stream=True, extra_body={"timeout": 0.1}
        )
        with pytest.raises(openai.APIError, match="Timed out"):
            async for _ in stream:
                pass
        await server.wait_idle()
