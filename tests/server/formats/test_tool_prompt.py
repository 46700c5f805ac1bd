"""Conversations with tools for templates that know none."""

from __future__ import annotations

from server.formats.model_format import ModelFormat
from server.formats.tool_prompt import knows_tools, told_in_text
from server.formats.tools import parse_tools
from tests.fakes import CHATML, IM_END, byte_tokenizer
from tests.server.server_kit import CHATML_TOOLS

TOOLS = parse_tools({"tools": [{"type": "function", "function": {"name": "f"}}]}).tools
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{{ m.content }}{% endfor %}"
)


def test_templates_that_know_tools_are_told_from_those_that_do_not():
    assert knows_tools([CHATML_TOOLS])
    assert knows_tools([CHATML, CHATML_TOOLS])
    assert not knows_tools([CHATML])
    assert not knows_tools([])


def test_tools_join_the_system_message_or_make_one():
    with_system = told_in_text(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], TOOLS
    )
    assert [m["role"] for m in with_system] == ["system", "user"]
    assert with_system[0]["content"].startswith("Be brief.\n\n")
    assert '{"type": "function", "function": {"name": "f"' in with_system[0]["content"]
    without = told_in_text([{"role": "user", "content": "Hi"}], TOOLS)
    assert [m["role"] for m in without] == ["system", "user"]
    assert told_in_text([{"role": "user", "content": "Hi"}], ()) == [
        {"role": "user", "content": "Hi"}
    ]


def test_calls_and_results_become_text_of_the_two_sides():
    told = told_in_text(
        [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "Hm.", "tool_calls": [CALL, CALL]},
            {"role": "tool", "content": "one", "tool_call_id": "c1"},
            {"role": "tool", "content": "two", "tool_call_id": "c1"},
            {"role": "user", "content": "And?"},
        ],
        (),
    )
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    results = "".join(f"<tool_response>\n{r}\n</tool_response>\n" for r in ("one", "two"))
    assert told == [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": f"Hm.\n{call}\n{call}"},
        {"role": "user", "content": results.rstrip()},
        {"role": "user", "content": "And?"},
    ]


def test_template_that_refuses_system_messages_is_told_in_the_first_message():
    model_format = ModelFormat(byte_tokenizer(NO_SYSTEM), 258, [IM_END])
    request = parse_tools({"tools": [{"type": "function", "function": {"name": "f"}}]})
    messages, _ = model_format.conversation([{"role": "user", "content": "Hi"}], request)
    model_format.close()
    [message] = messages
    assert message["role"] == "user"
    assert message["content"].endswith("\n\nHi")
    assert "<tools>" in message["content"]
