"""Reading request bodies: what is accepted, and that every refusal names field, value and range."""

from __future__ import annotations

import math

import pytest

from runtime.errors import InvalidRequest, ModelNotFound
from server.api.chat import ChatBody
from server.api.completions import CompletionBody
from server.api.incoming import read_value
from server.formats.conversation import parse_messages
from server.generation.params import ApiLimits
from tests.values import present

LIMITS = ApiLimits(model="m", vocab_size=100, context_length=1000, max_logprobs=20, max_n=8)
USER = [{"role": "user", "content": "hi"}]


def completion(**fields):
    """The parameters of a completion."""
    return read_value(CompletionBody, {"prompt": "x", **fields}, LIMITS).generation(LIMITS)


def chat_body(**fields):
    return read_value(ChatBody, {"messages": USER, **fields}, LIMITS)


def chat(**fields):
    """The parameters of a chat."""
    return chat_body(**fields).generation(LIMITS)


@pytest.mark.parametrize("parse", [completion, chat], ids=["completions", "chat"])
@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -1, "from 0 to 1000"),
        ("temperature", "hot", "a number"),
        ("temperature", math.inf, "a number"),
        ("top_p", 1.0001, "from 0 to 1"),
        ("top_p", [1], "from 0 to 1"),
        ("min_p", -0.1, "from 0 to 1"),
        ("top_k", 0.01, "an integer"),
        ("top_k", "5", "an integer"),
        ("top_k", -2, "at least -1"),
        ("n", 0, "between 1 and 8"),
        ("n", 1.5, "between 1 and 8"),
        ("n", 100000, "between 1 and 8"),
        ("max_tokens", -2473, "an integer of at least"),
        ("max_tokens", 1.5, "an integer"),
        ("max_tokens", "ten", "an integer"),
        ("max_tokens", True, "an integer"),
        ("seed", 1.5, "an integer"),
        ("stop", 5, "a string or a list"),
        ("stop", [5], "a string or a list"),
        ("stop", [""], "1 to"),
        ("stop_token_ids", [100], "between 0 and 99"),
        ("stop_token_ids", 5, "a list of at most 1024 token ids"),
        ("logit_bias", [1], "an object"),
        ("logit_bias", {"100": 1}, "between 0 and 99"),
        ("logit_bias", {"x": 1}, "between 0 and 99"),
        ("logit_bias", {"9" * 5000: 1}, "between 0 and 99"),
        ("logit_bias", {"5": 101}, "from -100 to 100"),
        ("presence_penalty", 2.5, "from -2 to 2"),
        ("repetition_penalty", 0, "from 0.001 to 1000"),
        ("stream", "maybe", "true or false"),
        ("stop_regex", "([", "stop_regex"),
        ("priority", "high", "an integer"),
        ("min_tokens", -1, "an integer"),
        ("timeout", -1, "at least 0"),
    ],
)
def test_a_wrong_value_is_refused_by_name(parse, field, value, allowed):
    with pytest.raises(InvalidRequest) as refused:
        parse(**{field: value})
    message = str(refused.value)
    assert message.startswith(field)
    assert allowed in message
    assert (refused.value.param or "").startswith(field)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "n": 2, "stream": True}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, 100]}, "prompt[0]"),
        ({"prompt": ["x", [1, -1]]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[0]"),
    ],
)
def test_a_wrong_completion_is_refused_by_name(body, param):
    with pytest.raises(InvalidRequest) as refused:
        completion(**body)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "hi",
        [],
        [5],
        [None],
        [{"content": "hi"}],
        [{"role": "bot", "content": "hi"}],
        [{"role": 5, "content": "hi"}],
        [{"role": ["user"], "content": "hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}],
        [{"role": "assistant", "tool_calls": [{"function": {}}]}],
        [{"role": "assistant", "tool_calls": "x"}],
    ],
)
def test_wrong_messages_are_refused(messages):
    with pytest.raises(InvalidRequest) as refused:
        chat(messages=messages)
    assert "messages" in present(refused.value.param)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": None}, "messages[0].content"),
        ({"content": None, "tool_calls": []}, "messages[0].content"),
        ({"content": "", "reasoning": 5}, "messages[0].reasoning"),
        ({"content": "", "tool_calls": {}}, "messages[0].tool_calls"),
        (
            {"content": "", "tool_calls": [{"function": {"name": "f"}, "id": 5}]},
            "messages[0].tool_calls[0].id",
        ),
        ({"content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
    ],
)
def test_what_is_wrong_in_a_message_is_named(message, param):
    with pytest.raises(InvalidRequest) as refused:
        chat(messages=[{"role": "assistant", **message}])
    assert refused.value.param == param


def test_text_parts_join_and_other_fields_are_left_to_the_template():
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello"}]
    (message,) = parse_messages([{"role": "developer", "content": parts, "id": 5, "name": "bob"}])
    assert message == {"role": "system", "content": "Say hello", "id": 5, "name": "bob"}


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ('{"city": "Paris"}', {"city": "Paris"}),
        ("{", "{"),
        ("null", "null"),
        ("[1]", "[1]"),
        ('"x"', '"x"'),
        ("", {}),
        (None, {}),
    ],
)
def test_tool_call_arguments_become_objects_or_stay_text(arguments, kept):
    call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": arguments}}
    (message,) = parse_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == kept
    assert message["content"] == ""


def test_unknown_fields_and_nulls_are_ignored():
    fields = {"store": False, "metadata": {"a": 1}, "user": "u", "service_tier": "auto", "x": [1]}
    for parse in (completion, chat):
        plain = parse()
        assert parse(**fields, temperature=None, stop=None, n=None, logit_bias=None) == plain


def test_values_that_mean_off_or_greedy():
    assert completion(top_k=-1).sampling.top_k == 0
    assert completion(top_k=0).sampling.top_k == 0
    assert completion(top_p=0).sampling.top_k == 1
    assert completion(temperature=1e-9).sampling.temperature == 0.0
    assert completion(logit_bias={}).sampling.logit_bias == ()


def test_defaults_follow_the_reference():
    assert (completion().sampling.max_new_tokens, completion().default_tokens) == (None, 16)
    assert (chat().sampling.max_new_tokens, chat().default_tokens) == (None, None)
    assert chat(max_tokens=5, max_completion_tokens=7).sampling.max_new_tokens == 7


def test_a_model_of_another_name_is_not_found():
    with pytest.raises(ModelNotFound, match="'other'"):
        completion(model="other")
    assert completion(model="m") == completion()


def test_logprobs_of_nothing_but_the_chosen_token():
    assert completion(logprobs=0).sampling.logprobs == 0
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).sampling.logprobs == 3
    with pytest.raises(InvalidRequest, match="logprobs to be true"):
        chat(top_logprobs=3)


def test_a_last_message_is_continued_only_without_a_generation_prompt():
    messages = [*USER, {"role": "assistant", "content": "1 2 3"}]
    render = chat_body(messages=messages, continue_final_message=True).conversation().render
    assert (render["add_generation_prompt"], render["continue_final_message"]) == (False, True)
    with pytest.raises(InvalidRequest, match="add_generation_prompt"):
        chat_body(
            messages=messages, continue_final_message=True, add_generation_prompt=True
        ).conversation()
    with pytest.raises(InvalidRequest, match="the assistant's"):
        chat_body(continue_final_message=True).conversation()
