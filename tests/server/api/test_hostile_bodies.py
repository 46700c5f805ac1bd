"""Bodies that are right JSON and ask for trouble: depth, size, encodings, foreign pages."""

from __future__ import annotations

import gzip
import time
import zlib
from typing import Any

import pytest

from runtime.errors import shown
from tests.fakes import fake_server
from tests.server.server_kit import CHATML_TOOLS, sim_server

USER = [{"role": "user", "content": "x"}]
ID = 10**6
FOREIGN = {"Origin": "http://evil.example"}


def nested(depth, leaf=1):
    for _ in range(depth // 2):
        leaf = {"a": [leaf]}
    return leaf


@pytest.fixture(scope="module")
def tooled():
    """A server whose chat template shows tools."""
    with sim_server(CHATML_TOOLS) as served:
        yield served


def deep_bodies(depth):
    deep = nested(depth)
    tool = {"name": "f", "parameters": {"type": "object", "properties": deep}}
    named = {"name": "f", "input_schema": tool["parameters"]}
    return [
        ("/v1/responses", {"input": "x", "metadata": deep, "max_output_tokens": 1}),
        ("/v1/responses", {"input": "x", "tools": [{"type": "function", **tool}]}),
        ("/v1/chat/completions", {"messages": USER, "tools": [{"function": tool}]}),
        ("/v1/chat/completions", {"messages": USER, "temperature": deep}),
        ("/v1/chat/completions", {"messages": USER, "chat_template_kwargs": deep}),
        ("/v1/chat/completions", {"messages": USER, "guided_json": {"enum": [deep]}}),
        ("/v1/messages", {"messages": USER, "max_tokens": 1, "tools": [named]}),
        ("/v1/completions", {"prompt": deep}),
        ("/v1/completions", {"prompt": "x", "unknown": deep}),
        ("/generate", {"text": "x", "sampling_params": deep}),
        ("/tokenize", {"messages": USER, "tools": [{"function": tool}]}),
        ("/detokenize", {"tokens": deep}),
        ("/abort_request", {"rid": deep}),
    ]


SMALL = {"/v1/responses": {"max_output_tokens": 1}, "/v1/chat/completions": {"max_tokens": 1}}


def statuses(served, bodies):
    post = served.openai._client.post
    return [
        (path, post(served.url + path, json={**SMALL.get(path, {}), **body}).status_code)
        for path, body in bodies
    ]


@pytest.mark.parametrize("depth", [120, 240, 300, 900])
def test_what_is_nested_too_deeply_is_400_on_every_route(tooled, depth):
    found = statuses(tooled, deep_bodies(depth))
    assert [status for _, status in found] == [400] * len(found), found


def test_what_is_nested_a_good_deal_is_refused_only_where_its_type_is_wrong(tooled):
    wrong = [{"messages", "temperature"}, {"prompt"}, {"tokens"}, {"rid"}]
    bodies = deep_bodies(80)
    expected = [(path, 400 if set(body) in wrong else 200) for path, body in bodies]
    assert statuses(tooled, bodies) == expected


def test_depth_is_of_brackets_not_of_characters_in_strings(tooled):
    body = {"messages": [{"role": "user", "content": "[{" * 5000}], "max_tokens": 1}
    answer = tooled.openai._client.post(tooled.url + "/v1/chat/completions", json=body)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    flat = {"prompt": [[1]] * 300, "max_tokens": 1}
    answer = tooled.openai._client.post(tooled.url + "/v1/completions", json=flat)
    assert answer.status_code in (200, 400)
    assert "nested" not in answer.text


@pytest.mark.parametrize("depth", [150, 300, 1000, 1500])
def test_arguments_that_are_deep_json_in_a_string_are_kept_as_text(tooled, depth):
    arguments = '{"a":' + "[" * depth + "]" * depth + "}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, *USER]
    body = {"messages": messages, "max_tokens": 1}
    for served_path in ("/v1/chat/completions", "/tokenize"):
        answer = tooled.openai._client.post(tooled.url + served_path, json=body)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "make",
    [
        lambda: "x" * 20_000_000,
        lambda: [[]] * 1_000_000,
        lambda: {str(i): [i] * 10 for i in range(50_000)},
        lambda: [["y" * 1000] * 1000] * 50,
    ],
    ids=["text", "lists", "object", "texts"],
)
def test_a_huge_wrong_value_is_quoted_without_writing_it_out(make):
    value = make()
    started = time.process_time()
    repr(value)
    written = time.process_time()
    told = shown(value)
    assert len(told) <= 80
    assert time.process_time() - written < (written - started) / 10


def test_values_that_fit_are_quoted_whole():
    for value in (None, True, -1, 2.5, "it's", [1, "a"], {"b": 1, "a": {}}, "a" * 78):
        assert eval(shown(value), {"null": None, "true": True}) == value
    assert shown("a" * 500).endswith("...")


@pytest.mark.parametrize(
    ("encoding", "encode"),
    [
        ("gzip", gzip.compress),
        ("x-gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", lambda data: zlib.compress(data)[2:-4]),
        ("GZIP", gzip.compress),
        ("identity", bytes),
    ],
)
async def test_encoded_bodies_are_decoded(encoding, encode):
    async with fake_server() as server:
        data = encode(b'{"prompt": "x", "max_tokens": 1}')
        headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
        url = server.url + "/v1/completions"
        async with server.client.post(url, data=data, headers=headers) as answer:
            assert answer.status == 200, await answer.text()


@pytest.mark.parametrize("encoding", ["zstd", "br", "compress", "gzip, br"])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_other_encodings_are_415_in_the_api_s_own_form(encoding, path):
    async with fake_server() as server:
        headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
        async with server.client.post(
            server.url + path, data=b"\x28\xb5", headers=headers
        ) as answer:
            assert answer.status == 415
            error = (await answer.json())["error"]
            assert encoding in error["message"]
            assert error["type"] == "invalid_request_error"


async def test_a_body_that_decodes_to_more_than_the_limit_is_413():
    async with fake_server(max_body_bytes=100_000) as server:
        data = gzip.compress(b'{"prompt": "' + b"x" * 50_000_000 + b'"}')
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        url = server.url + "/v1/completions"
        async with server.client.post(url, data=data, headers=headers) as answer:
            assert answer.status == 413
        cut = gzip.compress(b'{"prompt": "x"}')[:-9]
        async with server.client.post(url, data=cut, headers=headers) as answer:
            assert answer.status == 400


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
@pytest.mark.parametrize(
    ("path", "data"), [("/abort_request", b'{"abort_all": true}'), ("/flush_cache", b"")]
)
async def test_a_foreign_page_orders_nothing_by_requests_that_need_no_leave(kind, path, data):
    async with fake_server() as server:
        headers = FOREIGN | ({"Content-Type": kind} if kind else {})
        url = server.url + path
        skip: dict[str, Any] = {} if kind else {"skip_auto_headers": ["Content-Type"]}
        async with server.client.post(url, data=data, headers=headers, **skip) as answer:
            assert answer.status == 415
            assert "application/json" in (await answer.json())["error"]["message"]
        for origin in ({}, {"Origin": server.url}):
            headers = origin | ({"Content-Type": kind} if kind else {})
            async with server.client.post(url, data=data, headers=headers, **skip) as answer:
                assert answer.status == 200


async def test_pages_that_are_allowed_and_programs_that_send_json_are_served():
    """Desktop programs send an origin of their own and need no leave for JSON."""
    async with fake_server() as server:
        url = server.url + "/v1/completions"
        async with server.client.post(url, json={"prompt": "x"}, headers=FOREIGN) as answer:
            assert answer.status == 200
    async with fake_server(cors_allow_origins="http://evil.example") as server:
        headers = FOREIGN | {"Content-Type": "text/plain"}
        url = server.url + "/abort_request"
        async with server.client.post(url, data=b'{"rid": "x"}', headers=headers) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(("length", "status"), [(65, 200), (128, 200), (129, 400)])
def test_tool_names_of_messages_go_to_128_characters(tooled, length, status):
    tool = {"name": "n" * length, "input_schema": {"type": "object", "properties": {}}}
    body = {"max_tokens": 1, "messages": USER, "tools": [tool]}
    assert statuses(tooled, [("/v1/messages", body)]) == [("/v1/messages", status)]
    function = {"type": "function", "function": {"name": "n" * length}}
    chat = {"messages": USER, "tools": [function]}
    assert statuses(tooled, [("/v1/chat/completions", chat)])[0][1] == 400


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [ID]}, "prompt[0]"),
        ("/v1/completions", {"prompt": ["x", [1, ID]]}, "prompt[1]"),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [ID]}, "stop_token_ids"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {str(ID): 1}}, "logit_bias"),
        ("/v1/chat/completions", {"messages": USER, "stop_token_ids": [-1]}, "stop_token_ids"),
        ("/v1/responses", {"input": "x", "logit_bias": {str(ID): 1}}, "logit_bias"),
        ("/v1/responses", {"input": "x", "stop_token_ids": [ID]}, "stop_token_ids"),
        ("/generate", {"input_ids": [ID]}, "input_ids[0]"),
        ("/generate", {"input_ids": [[1], [ID]]}, "input_ids[1]"),
        ("/generate", {"text": "x", "sampling_params": {"stop_token_ids": [ID]}},
         "sampling_params.stop_token_ids"),
        ("/generate", {"text": "x", "sampling_params": {"logit_bias": {str(ID): 1}}},
         "sampling_params.logit_bias"),
        ("/detokenize", {"tokens": [ID]}, "tokens"),
    ],
)  # fmt: skip
async def test_every_token_id_is_bounded_where_it_enters(path, body, param):
    async with fake_server() as server:
        last = server.service.limits.vocab_size - 1
        status, answer = await server.post(path, body)
        assert (status, answer["error"]["param"]) == (400, param)
        assert f"between 0 and {last}" in answer["error"]["message"]
