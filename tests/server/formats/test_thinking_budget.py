"""A bound on the reasoning: after so many tokens its end mark comes, and then the answer."""

from __future__ import annotations

import json

import numpy as np
import pytest

from runtime.errors import GenerationFailed
from server.formats.thinking_budget import ThinkingBudget
from tests.fakes import IM_END, byte_tokenizer, fake_runner, fake_server, make_fake_service
from tests.server.generation.grammars import Scripted
from tests.server.server_kit import CHATML_TOOLS

START, END = 258, 259
MARKS = ("<think>", "</think>")
THOUGHT, ANSWER = "0123456789", '{"a": 1}'
ASKED = [{"role": "user", "content": "hi"}]
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def thinks(request, index):
    """Ten tokens of reasoning and its end; after an end, wherever it came, the answer."""
    said = list(request.output_ids[:index])
    if END in said:
        answer = [*ANSWER.encode(), IM_END]
        return answer[min(index - said.index(END) - 1, len(answer) - 1)]
    return [*THOUGHT.encode(), END][min(len(said) - said.count(START), len(THOUGHT))]


def opens(request, index):
    """The same, after a start mark of the model's own."""
    return thinks(request, index) if index else START


def service(script=thinks, **options):
    tokenizer = byte_tokenizer(CHATML_TOOLS, MARKS)
    runner = fake_runner(script)
    runner.info = type(runner.info)(
        max_total_tokens=runner.info.max_total_tokens,
        vocab_size=tokenizer.vocab_size,
        details=runner.info.details,
    )
    return make_fake_service(runner, tokenizer, reasoning_parser="qwen3", **options)


async def chat(server, **fields):
    body = {"messages": ASKED, "max_tokens": 60, **THINKS, **fields}
    status, answer = await server.post("/v1/chat/completions", body)
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    return message.get("reasoning_content") or "", message["content"]


@pytest.mark.parametrize("disable_overlap", [False, True], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("most", [0, 1, 4, 9, 10, 11, 500])
async def test_the_reasoning_has_at_most_so_many_tokens(most, disable_overlap):
    for script, more in ((thinks, THINKS), (opens, {"chat_template_kwargs": {}})):
        async with fake_server(service(script, disable_overlap=disable_overlap)) as server:
            found = await chat(server, thinking_token_budget=most, **more)
            assert found == (THOUGHT[:most], ANSWER)
            await server.wait_idle()


async def test_without_a_bound_it_goes_on_to_its_end():
    async with fake_server(service(disable_overlap=True)) as server:
        for fields in ({}, {"max_thinking_tokens": -1}, {"thinking_token_budget": None}):
            assert await chat(server, **fields) == (THOUGHT, ANSWER)


async def test_a_grammar_rules_what_comes_after_it():
    async with fake_server(service()) as server:
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        found = await chat(server, response_format=wanted, thinking_budget_tokens=3)
        assert found == (THOUGHT[:3], ANSWER)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": ASKED, "max_tokens": 60,
                          "thinking": {"type": "enabled", "budget_tokens": 4}}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 60, "reasoning": {"max_tokens": 4}}),
        ("/v1/chat/completions", {"messages": ASKED, "reasoning_budget_tokens": 4}),
    ],
)  # fmt: skip
async def test_every_protocol_has_its_field(path, body):
    async with fake_server(service()) as server:
        status, answer = await server.post(path, {**THINKS, **body})
        assert status == 200
        text = json.dumps(answer)
        assert f'"{THOUGHT[:4]}"' in text
        assert f'"{THOUGHT[:5]}' not in text
        assert json.dumps(ANSWER) in text


def test_it_follows_committed_tokens_and_asks_its_grammar_first():
    """What is sampled and taken back is never counted: a mask is made of what was accepted."""

    class Grammar(Scripted):
        def fill_mask(self, bits):
            bits.fill(0b11)

    grammar = Grammar()
    budget = ThinkingBudget(2, START, END, inside=True, inner=grammar)
    bits = np.full(9, -1, dtype=np.int32)
    for token in (5, 6):
        for _ in range(3):
            budget.fill_mask(bits)
            assert bits.tolist() == [0b11] * 9
        budget.accept(token)
    budget.fill_mask(bits)
    assert np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist() == [END]
    budget.accept(END)
    budget.fill_mask(bits)
    assert bits.tolist() == [0b11] * 9
    grammar.failed = GenerationFailed("a limit")
    assert budget.failed is grammar.failed
    budget.close()
    assert grammar.closed


async def test_an_end_that_is_no_token_cannot_be_forced():
    tokenizer = byte_tokenizer(CHATML_TOOLS)
    found = make_fake_service(tokenizer=tokenizer, reasoning_parser="qwen3")
    async with fake_server(found) as server:
        body = {"messages": ASKED, "thinking_token_budget": 4}
        status, answer = await server.post("/v1/chat/completions", body)
        assert status == 400
        assert answer["error"]["param"] == "thinking_token_budget"
        assert "</think>, is no token of this model" in answer["error"]["message"]
