"""Messages as clients write them, and as templates take them."""

from __future__ import annotations

import pytest

from server.formats.chat_messages import parse_messages

CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


@pytest.mark.parametrize("calls", [[], None])
def test_an_empty_list_of_calls_is_as_if_it_were_not_there(calls):
    sent = {"role": "assistant", "content": "Good morning", "tool_calls": calls}
    assert parse_messages([sent]) == [{"role": "assistant", "content": "Good morning"}]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_found_under_each_of_its_names(name):
    [message] = parse_messages([{"role": "assistant", "content": "a", name: "hm"}])
    assert (message["reasoning_content"], message["thinking"]) == ("hm", "hm")
    assert "reasoning" not in message


def test_older_forms_of_calls_and_results_are_the_newer_ones():
    call = {"name": "f", "arguments": '{"a": 1}'}
    assert parse_messages(
        [
            {"role": "assistant", "content": None, "function_call": call},
            {"role": "function", "name": "f", "content": "one"},
        ]
    ) == [
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "one", "name": "f"},
    ]


def test_a_refusal_is_what_the_assistant_said():
    [message] = parse_messages([{"role": "assistant", "content": None, "refusal": "No."}])
    assert message == {"role": "assistant", "content": "No."}


def test_other_fields_of_a_message_reach_the_template_and_nulls_do_not():
    sent = {"role": "system", "content": "", "tools": '[{"name": "f"}]', "audio": None, "name": "x"}
    [message] = parse_messages([sent])
    assert message == {"role": "system", "content": "", "tools": '[{"name": "f"}]', "name": "x"}
