"""Limits of the grammar library: a sentence to the one who met them, and nothing to others."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes import fake_server

# Right-recursive rules, any of which may be meant: after two letters there are too many ways on.
AMBIGUOUS = "\n".join(
    ["start: (" + "|".join(f"r{i}" for i in range(400)) + ")*"]
    + [f'r{i}: "a" r{(i * 7 + 1) % 400} | "a" r{(i * 11 + 3) % 400} | "a"' for i in range(400)]
)
OPTIONAL = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(600)}}
LARGE = {
    "allOf": [
        {"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(4)]} for i in range(8)
    ]
}


def _branching():
    """A oneOf whose branches have branches, which have branches."""
    defs = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{(i * 7 + j) % 60}"} for j in range(40)]}
        for i in range(60)
    }
    return {"$defs": defs, "oneOf": [{"$ref": f"#/$defs/d{i}"} for i in range(60)]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"guided_json": OPTIONAL}, "600 properties that may be left out"),
        ({"guided_json": LARGE}, "too large"),
        ({"guided_json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "anyOf takes them"),
        ({"guided_json": {"const": -(2**63)}}, "cannot be enforced"),
        ({"guided_regex": "(" * 4000 + "a" + ")" * 4000}, "levels deep"),
        ({"guided_grammar": "start: " + "(" * 4000}, "levels deep"),
        ({"guided_grammar": 'start: "a" nothing'}, "unknown name"),
        ({"guided_grammar": "root ::= " + "(" * 4000}, "guided_grammar: "),
    ],
    ids=["optional", "large", "one-of", "constant", "groups", "brackets", "name", "gbnf"],
)
async def test_a_grammar_that_cannot_be_compiled_is_a_400_in_a_sentence(fields, words):
    async with fake_server() as server:
        status, body = await server.post("/v1/completions", {"prompt": "x", **fields})
        message = body["error"]["message"]
        assert (status, body["error"]["param"]) == (400, next(iter(fields))), message
        assert words in message
        assert len(message) < 250
        await server.complete(max_tokens=2)


# Looking through each of these took minutes, or grew with the square of its length.
@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "[" * 50_000},
        {"guided_grammar": "start: " + '"\\' * 50_000},
        {"guided_grammar": "a" * 100_000},
        {"guided_json": _branching()},
    ],
    ids=["classes", "quotes", "name", "branches"],
)
async def test_what_takes_long_to_look_through_is_looked_through_once(fields):
    async with asyncio.timeout(20), fake_server() as server:
        status, body = await server.post("/v1/completions", {"prompt": "x", **fields})
        assert status == 400, body


# The library sought ahead for ever, at the first token or behind the "x", and took all memory.
@pytest.mark.parametrize(
    ("fields", "begins"),
    [
        ({"guided_grammar": "start: /a+/ /a+/"}, "a"),
        ({"guided_grammar": 'start: "x" (/a+/ /a+/) | "x"~2'}, "x"),
        ({"guided_regex": "(a{2000}){2000}"}, "aaaa"),
        ({"guided_json": {"type": "string", "pattern": "^a{1000000}$"}}, '"aaa'),
        ({"guided_choice": ["a" * 100_000]}, "aaaa"),
    ],
    ids=["never-reached", "later", "repeated", "pattern", "choice"],
)
async def test_what_leaves_no_choice_is_not_sought_ahead(fields, begins):
    async with asyncio.timeout(20), fake_server() as server:
        body = {"prompt": "x", "max_tokens": 8, "ignore_eos": True, **fields}
        status, found = await server.post("/v1/completions", body)
        assert status == 200, found
        assert found["choices"][0]["text"].startswith(begins)


async def test_a_grammar_that_is_too_long_is_not_looked_at():
    async with fake_server() as server:
        for value in ("x" * 200_000, {"enum": ["x" * 200_000]}):
            field = "guided_regex" if isinstance(value, str) else "guided_json"
            status, body = await server.post("/v1/completions", {"prompt": "x", field: value})
            assert status == 400
            assert "characters" in body["error"]["message"]


async def test_a_limit_met_while_running_ends_that_request_with_its_reason():
    async with fake_server() as server:
        other = asyncio.create_task(server.complete(max_tokens=30))
        status, body = await server.post(
            "/v1/completions", {"prompt": "x", "guided_grammar": AMBIGUOUS, "max_tokens": 30}
        )
        assert (status, body["error"]["param"]) == (400, "guided_grammar")
        assert "too ambiguous" in body["error"]["message"]
        assert len((await other)["choices"][0]["text"]) == 30
        await server.wait_idle()


@pytest.mark.parametrize(
    "grammar", ['start: e\ne: e e | "a"', 'root ::= e\ne ::= e e e | e e | "a" | "b"']
)
async def test_rules_whose_masks_take_ever_longer_end_their_request_alone(grammar):
    """Each mask takes as long as the square of what there is: at 400 letters 0.1 s, for all."""
    async with fake_server() as server:
        fields = {"guided_grammar": grammar, "max_tokens": 2000, "ignore_eos": True}
        status, body = await server.post("/v1/completions", {"prompt": "x", **fields})
        assert (status, body["error"]["param"]) == (400, "guided_grammar")
        assert "too ambiguous" in body["error"]["message"]
        await server.complete(max_tokens=2)


async def test_a_tool_of_too_many_parameters_is_refused_where_calls_are_keyword_arguments():
    tool = {"name": "f", "parameters": {"properties": {f"p{i}": {} for i in range(3000)}}}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": tool}],
        "tool_choice": "required",
    }
    async with fake_server(tool_call_parser="pythonic", context_length=65_536) as server:
        status, found = await server.post("/v1/chat/completions", body)
        assert status == 400
        assert "3000 parameters" in found["error"]["message"]
