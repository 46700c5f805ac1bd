"""Every field that says what the output must look like does so, on every route that has it.

The model would talk for ever; each rule allows one output alone.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import fake_server

SCHEMA = {"const": "yes"}
QUOTED, PLAIN = '"yes"', "yes"
LARK, GBNF = 'start: "yes"', 'root ::= "yes"'
TAG = {"format": {"type": "const_string", "value": "yes"}}
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
# Of every route: SGLang's and llama.cpp's names, and both of vLLM's.
COMMON: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": SCHEMA}, QUOTED),
    ({"json_schema": '{"const": "yes"}'}, QUOTED),
    ({"regex": "yes"}, PLAIN),
    ({"ebnf": LARK}, PLAIN),
    ({"grammar": GBNF}, PLAIN),
    ({"structural_tag": TAG}, PLAIN),
    ({"guided_json": SCHEMA}, QUOTED),
    ({"guided_regex": "yes"}, PLAIN),
    ({"guided_choice": ["yes"]}, PLAIN),
    ({"guided_grammar": LARK}, PLAIN),
    ({"structured_outputs": {"json": SCHEMA}}, QUOTED),
    ({"structured_outputs": {"regex": "yes"}}, PLAIN),
    ({"structured_outputs": {"choice": ["yes"]}}, PLAIN),
    ({"structured_outputs": {"grammar": GBNF}}, PLAIN),
    ({"structured_outputs": {"structural_tag": TAG}}, PLAIN),
    ({"response_format": NAMED}, QUOTED),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, QUOTED),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, QUOTED),
    ({"response_format": {"type": "structural_tag", **TAG}}, PLAIN),
]
OWN_FORMAT = {"type": "json_schema", "schema": SCHEMA}
OWN: dict[str, list[tuple[dict[str, Any], str]]] = {
    "/v1/responses": [({"text": {"format": {"name": "x", **OWN_FORMAT}}}, QUOTED)],
    "/v1/messages": [
        ({"output_config": {"format": OWN_FORMAT}}, QUOTED),
        ({"output_format": OWN_FORMAT}, QUOTED),
    ],
}
USER = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "x", "max_tokens": 99},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": USER, "max_tokens": 99},
    "/generate": {"text": "x"},
}


def said(path: str, answer: Any) -> str:
    match path:
        case "/v1/chat/completions":
            return answer["choices"][0]["message"]["content"]
        case "/v1/completions":
            return answer["choices"][0]["text"]
        case "/v1/responses":
            return answer["output"][0]["content"][0]["text"]
        case "/v1/messages":
            return answer["content"][0]["text"]
    return answer["text"]


@pytest.mark.parametrize("path", BODIES)
async def test_the_output_is_what_the_field_wants(path):
    async with fake_server() as server:
        for fields, wanted in COMMON + OWN.get(path, []):
            more = {"sampling_params": fields} if path == "/generate" else fields
            status, answer = await server.post(path, {**BODIES[path], **more})
            assert status == 200, (fields, answer)
            assert said(path, answer) == wanted, fields


@pytest.mark.parametrize("path", BODIES)
async def test_two_rules_at_once_are_refused_by_name(path):
    async with fake_server() as server:
        fields = {"regex": "yes", "json_schema": SCHEMA}
        more = {"sampling_params": fields} if path == "/generate" else fields
        status, answer = await server.post(path, {**BODIES[path], **more})
        assert status == 400
        assert "regex" in answer["error"]["message"]
        assert "json_schema" in answer["error"]["message"]
