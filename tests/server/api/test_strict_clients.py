"""The official clients with strict validation of every answer, on every route they have."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest

from tests.server.server_kit import say

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "parameters": PARAMETERS, "strict": False}
TIMED = {"X-Loomserve-Timings": "1"}
TEXT, THOUGHT, CALLED = say("Hello"), say("<think>hm</think>Yes"), say(CALL)


@pytest.fixture(scope="module")
def strict(thinker):
    """Both clients of a model that reasons and calls tools."""
    ours: dict[str, Any] = {
        "api_key": "none",
        "max_retries": 0,
        "_strict_response_validation": True,
    }
    with (
        openai.OpenAI(base_url=thinker.url + "/v1", **ours) as of_openai,
        anthropic.Anthropic(base_url=thinker.url, **ours) as of_anthropic,
    ):
        yield of_openai, of_anthropic, thinker.model


def whole_and_streamed(create, **fields):
    """The answer, and the list of a stream's events; the client has validated both."""
    answer = create(**fields)
    events = list(create(stream=True, **fields))
    assert events
    return answer, events


@pytest.mark.parametrize(
    ("text", "fields", "reason"),
    [
        (TEXT, {}, "stop"),
        (TEXT, {"logprobs": True, "top_logprobs": 2}, "stop"),
        (TEXT, {"max_tokens": 2}, "length"),
        (TEXT, {"stop": "l", "n": 2}, "stop"),
        (TEXT, {"extra_headers": TIMED}, "stop"),
        (THOUGHT, {}, "stop"),
        (CALLED, {"tools": [{"type": "function", "function": FUNCTION}]}, "tool_calls"),
    ],
)
def test_chat(strict, text, fields, reason):
    client, _, model = strict
    messages = [{"role": "user", "content": text}]
    answer, events = whole_and_streamed(
        client.chat.completions.create, model=model, messages=messages, **fields
    )
    assert answer.choices[0].finish_reason == reason
    assert [e.choices[0].finish_reason for e in events if e.choices][-1] == reason


def test_completions(strict):
    client, _, model = strict
    answer = client.completions.create(model=model, prompt=say("hello"), logprobs=2, max_tokens=5)
    assert answer.choices[0].text == "hello"
    # Streamed ones have finish_reason null until the last, as OpenAI's own have; the client's
    # types do not say so, and its strict validation refuses them of any server.


@pytest.mark.parametrize(
    ("text", "fields", "status"),
    [
        (TEXT, {}, "completed"),
        (TEXT, {"max_output_tokens": 2}, "incomplete"),
        (TEXT, {"extra_headers": TIMED}, "completed"),
        (THOUGHT, {}, "completed"),
        (CALLED, {"tools": [{"type": "function", **FUNCTION}]}, "completed"),
        (
            say("{}"),
            {
                "instructions": "Be brief.",
                "metadata": {"a": "b"},
                "reasoning": {"effort": "low"},
                "text": {"format": {"type": "json_object"}},
            },
            "completed",
        ),
    ],
)
def test_responses(strict, text, fields, status):
    client, _, model = strict
    answer, events = whole_and_streamed(client.responses.create, model=model, input=text, **fields)
    assert answer.status == events[-1].response.status == status
    assert answer.usage.input_tokens_details.cache_write_tokens == 0


@pytest.mark.parametrize(
    ("text", "fields", "reason"),
    [
        (TEXT, {}, "end_turn"),
        (TEXT, {"max_tokens": 2}, "max_tokens"),
        (TEXT, {"stop_sequences": ["l"]}, "stop_sequence"),
        (TEXT, {"extra_headers": TIMED}, "end_turn"),
        (THOUGHT, {"thinking": {"type": "adaptive"}}, "end_turn"),
        (CALLED, {"tools": [{"name": "get_weather", "input_schema": PARAMETERS}]}, "tool_use"),
    ],
)
def test_messages(strict, text, fields, reason):
    _, client, model = strict
    fields = {"max_tokens": 100, **fields}
    messages = [{"role": "user", "content": text}]
    answer, events = whole_and_streamed(
        client.messages.create, model=model, messages=messages, **fields
    )
    assert answer.stop_reason == reason
    assert [e.delta.stop_reason for e in events if e.type == "message_delta"] == [reason]
    assert client.messages.count_tokens(model=model, messages=messages).input_tokens > 0


def test_models(strict):
    of_openai, of_anthropic, model = strict
    for client in (of_openai, of_anthropic):
        assert [one.id for one in client.models.list()] == [model]
        assert client.models.retrieve(model).id == model
    assert of_anthropic.models.retrieve(model).type == "model"
    assert of_openai.models.retrieve(model).object == "model"
    with pytest.raises(anthropic.NotFoundError):
        of_anthropic.models.retrieve("other")
