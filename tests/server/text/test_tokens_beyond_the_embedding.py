"""A tokenizer that knows more tokens than the model: their names in a request's text are refused,
whatever field holds them, and nobody else notices."""

from __future__ import annotations

import asyncio

import pytest
import tokenizers
from tokenizers import models

from runtime.errors import InvalidRequest
from server.text.tokenizer import Tokenizer
from tests.fakes import (
    VOCAB_SIZE,
    byte_tokenizer,
    fake_runner,
    fake_server,
    make_fake_service,
)

IMAGE = "<image_soft_token>"
CHAT = [{"role": "user", "content": "hello"}]
IN_CHAT = [{"role": "user", "content": f"see {IMAGE}"}]
TOOL = {"type": "function", "function": {"name": "f", "description": IMAGE, "parameters": {}}}
TOOLS_TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ extra }}"
)


def service(template=TOOLS_TEMPLATE):
    return make_fake_service(fake_runner(), byte_tokenizer(template, (IMAGE,)))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        pytest.param("/v1/completions", {"prompt": f"see {IMAGE}"}, "prompt", id="prompt"),
        pytest.param("/v1/completions", {"prompt": ["hi", IMAGE]}, "prompt", id="prompts"),
        pytest.param("/generate", {"text": IMAGE}, "prompt", id="generate"),
        pytest.param("/tokenize", {"prompt": IMAGE}, "prompt", id="tokenize"),
        pytest.param(
            "/v1/completions", {"prompt": "hi", "bad_words": [IMAGE]}, "bad_words", id="bad-words"
        ),
    ],
)
async def test_a_name_of_an_unknown_token_is_refused_and_named(path, body, param):
    async with fake_server(service()) as server:
        expected = await server.complete(max_tokens=300)
        other = asyncio.create_task(server.complete(max_tokens=300))
        await asyncio.sleep(0)
        status, answer = await server.post(path, {"model": "fake", **body})
        assert status == 400, answer
        error = answer["error"]
        assert f"{param}: holds '{IMAGE}', token {VOCAB_SIZE} of the tokenizer" in error["message"]
        assert f"end at {VOCAB_SIZE - 1}" in error["message"]
        # Who is being answered meanwhile is answered alike.
        assert (await other)["choices"] == expected["choices"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("/v1/chat/completions", {"messages": IN_CHAT}, id="chat"),
        pytest.param("/v1/responses", {"input": IMAGE}, id="responses"),
        pytest.param("/v1/messages", {"messages": IN_CHAT, "max_tokens": 4}, id="messages"),
        pytest.param("/v1/chat/completions", {"messages": CHAT, "tools": [TOOL]}, id="tools"),
        pytest.param(
            "/v1/chat/completions",
            {"messages": CHAT, "chat_template_kwargs": {"extra": IMAGE}},
            id="template-variables",
        ),
    ],
)
async def test_in_a_conversation_the_name_is_plain_text_unless_names_are_tokens(path, body):
    async with fake_server(service()) as server:
        assert (await server.post(path, body))[0] == 200
        server.service.tokenizer.allow_special_in_content()
        status, answer = await server.post(path, body)
        assert status == 400
        assert f"messages: holds '{IMAGE}'" in answer["error"]["message"]


async def test_a_stop_string_that_names_one_stays_a_string():
    """As a token it cannot come; written out it can."""
    said = [*f"so {IMAGE}".encode(), ord("x")]
    runner = fake_runner(lambda request, index: said[min(index, len(said) - 1)])
    tokenizer = byte_tokenizer(more=(IMAGE,))
    async with fake_server(make_fake_service(runner, tokenizer)) as server:
        for fields in ({}, {"min_tokens": 2}):
            found = await server.complete(stop=[IMAGE], max_tokens=60, **fields)
            assert found["choices"][0]["text"] == "so "
            assert found["choices"][0]["finish_reason"] == "stop"


async def test_an_empty_prompt_does_not_become_one():
    tokenizer = byte_tokenizer(more=(IMAGE,))
    tokenizer.bos_token_id = VOCAB_SIZE
    async with fake_server(make_fake_service(fake_runner(), tokenizer)) as server:
        status, answer = await server.post("/v1/completions", {"prompt": ""})
        assert status == 400
        assert "prompt: is empty" in answer["error"]["message"]


def test_a_tokenizer_within_the_embedding_is_not_searched():
    tokenizer = byte_tokenizer(more=(IMAGE,))
    tokenizer.limit_ids(VOCAB_SIZE + 1)
    assert tokenizer.encode(IMAGE) == [VOCAB_SIZE]


def test_a_text_without_tokens_for_it_is_refused():
    """Unigram without an unknown token, and without bytes to fall back on."""
    backend = tokenizers.Tokenizer(models.Unigram([("hello", -1.0)], unk_id=None))
    tokenizer = Tokenizer(backend)
    with pytest.raises(InvalidRequest, match="prompt: cannot be tokenized: Encountered an unknown"):
        tokenizer.encode("é")
