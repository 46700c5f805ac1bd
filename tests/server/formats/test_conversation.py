"""Conversations, as clients write them, made into what a template shows."""

from __future__ import annotations

import dataclasses
import json

import pytest

from server.formats.conversation import fit, parse_messages
from server.formats.events import CallArguments, CallStart
from server.formats.template_traits import TemplateTraits
from server.formats.tool_families import TOOL_FAMILIES
from server.formats.tools import parse_tools
from server.text.chat_template import ChatTemplate
from tests.server.formats.random_chats import own_templates
from tests.values import present

TOOLS = present(parse_tools([{"type": "function", "function": {"name": "f"}}])).tools
USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
BARE_CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
OTHER = {"id": "c2", "type": "function", "function": {"name": "f", "arguments": {"a": 2}}}
RESULTS = [
    {"role": "tool", "tool_call_id": "c2", "content": "two"},
    {"role": "tool", "tool_call_id": "c1", "content": "one"},
]
NATIVE = TemplateTraits(tools_in="variable", calls=True, results=True)


def fitted(messages, tools=(), family="hermes", **traits):
    start = NATIVE if traits.pop("native", True) else TemplateTraits()
    return fit(messages, tools, dataclasses.replace(start, **traits), TOOL_FAMILIES[family])


def test_a_template_that_shows_everything_gets_it_as_it_is():
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULTS[1]]
    assert fitted(messages, TOOLS) == (
        messages,
        {"tools": [TOOLS[0].openai()], "tools_variable": "tools"},
    )


def test_told_tools_join_the_system_message_or_make_one():
    rule = {"role": "system", "content": "Be brief."}
    with_system, options = fitted([rule, USER], TOOLS, native=False)
    assert options == {}
    assert [m["role"] for m in with_system] == ["system", "user"]
    assert with_system[0]["content"].startswith("Be brief.\n\n")
    assert '{"type": "function", "function": {"name": "f"' in with_system[0]["content"]
    assert "<tool_call>" in with_system[0]["content"]
    without, _ = fitted([USER], TOOLS, native=False)
    assert [m["role"] for m in without] == ["system", "user"]
    assert fitted([USER], native=False) == ([USER], {})
    assert rule["content"] == "Be brief.", "what was given is left as it is"


def test_a_template_that_refuses_system_messages_is_told_in_the_first_one():
    [message], _ = fitted([USER], TOOLS, native=False, system=False)
    assert message["role"] == "user"
    assert message["content"].endswith("\n\nHi")
    assert "<tools>" in message["content"]


def test_tools_are_told_of_in_the_form_that_the_answer_is_read_in():
    [told, _], _ = fitted([USER], TOOLS, family="pythonic", native=False)
    assert "[<function name>(<object of arguments>)]" in told["content"]
    assert "<tool_call>" not in told["content"]


def test_calls_and_results_become_text_of_the_two_sides():
    told, _ = fitted(
        [
            USER,
            {"role": "assistant", "content": "Hm.", "tool_calls": [CALL, CALL]},
            *RESULTS,
            {"role": "user", "content": "And?"},
        ],
        native=False,
    )
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    results = "".join(f"<tool_response>\n{r}\n</tool_response>\n" for r in ("two", "one"))
    assert told == [
        USER,
        {"role": "assistant", "content": f"Hm.\n{call}\n{call}"},
        {"role": "user", "content": results.rstrip()},
        {"role": "user", "content": "And?"},
    ]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]'),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}'),
        ("pythonic", "[f(a=1)]"),
    ],
)
def test_calls_in_words_are_written_as_the_model_writes_them(family, text):
    said = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    [_, told], _ = fitted([USER, said], family=family, calls=False)
    assert told == {"role": "assistant", "content": text}
    request = present(parse_tools([{"type": "function", "function": {"name": "f"}}]))
    parser = TOOL_FAMILIES[family].read(request)
    start, *rest = [*parser.feed(text), *parser.finish()]
    assert isinstance(start, CallStart)
    assert start.name == "f"
    pieces = [event.text for event in rest if isinstance(event, CallArguments)]
    assert len(pieces) == len(rest)
    assert json.loads("".join(pieces)) == {"a": 1}


def test_tools_go_into_a_field_of_the_system_message():
    [rule, user], options = fitted([USER], TOOLS, tools_in="system", tools_as_json=True)
    assert (rule["role"], rule["content"], user, options) == ("system", "", USER, {})
    assert json.loads(rule["tools"]) == [TOOLS[0].openai()]


def test_several_calls_become_one_after_the_other_each_with_its_result():
    said = {"role": "assistant", "content": "Hm.", "tool_calls": [CALL, OTHER]}
    found, _ = fitted([USER, said, *RESULTS, USER], one_call=True)
    assert found == [
        USER,
        {"role": "assistant", "content": "Hm.", "tool_calls": [CALL]},
        RESULTS[1],
        {"role": "assistant", "content": "", "tool_calls": [OTHER]},
        RESULTS[0],
        USER,
    ]


def test_arguments_are_given_in_the_form_that_the_template_takes():
    odd = {**CALL, "function": {"name": "f", "arguments": '{"a": 1'}}
    said = {"role": "assistant", "content": "", "tool_calls": [CALL, odd]}

    def arguments(**traits):
        [message], _ = fitted([said], **traits)
        return [call["function"]["arguments"] for call in message["tool_calls"]]

    assert arguments() == [{"a": 1}, '{"a": 1']
    assert arguments(arguments_as_json=True) == ['{"a": 1}', '{"a": 1']
    assert arguments(takes_odd_arguments=False) == [{"a": 1}, {"arguments": '{"a": 1'}]


def test_ids_of_calls_are_made_what_the_template_demands():
    calls = [
        {**CALL, "id": "call_0123456789abcdef"},
        {**CALL, "id": "toolu_Ab3Ab3Ab3"},
        {key: value for key, value in CALL.items() if key != "id"},
    ]
    results = [
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "one"},
        {"role": "tool", "tool_call_id": calls[1]["id"], "content": "two"},
        {"role": "tool", "content": "three"},
    ]
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    found, _ = fitted(messages, nine_character_ids=True)
    ids = [call["id"] for call in found[1]["tool_calls"]]
    assert [message["tool_call_id"] for message in found[2:]] == ids
    assert all(len(one) == 9 and one.isalnum() and one.isascii() for one in ids)
    assert len(set(ids)) == 3
    assert ids[1] == "Ab3Ab3Ab3", "an id of ours behind another protocol's prefix is found again"
    assert fitted(messages, nine_character_ids=True)[0] == found, "the same ids each time"
    text = ChatTemplate(own_templates()["mistral"], {"bos_token": "", "eos_token": ""}).render(
        found
    )
    assert all(f'"id": "{one}"' in text and f'"call_id": "{one}"' in text for one in ids)


def test_a_template_that_takes_parts_gets_parts():
    assert fitted([USER], parts=True) == (
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        {},
    )


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
        {"role": "assistant", "content": "", "tool_calls": [BARE_CALL]},
        {"role": "tool", "content": "one", "name": "f"},
    ]


def test_a_refusal_is_what_the_assistant_said():
    [message] = parse_messages([{"role": "assistant", "content": None, "refusal": "No."}])
    assert message == {"role": "assistant", "content": "No."}


def test_other_fields_of_a_message_reach_the_template_and_nulls_do_not():
    sent = {"role": "system", "content": "", "tools": '[{"name": "f"}]', "audio": None, "name": "x"}
    [message] = parse_messages([sent])
    assert message == {"role": "system", "content": "", "tools": '[{"name": "f"}]', "name": "x"}
