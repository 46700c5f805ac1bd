"""Each tool-call parser on whole texts and on every way to cut them in three."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from server.formats.events import CallArguments, CallStart, Text
from server.formats.json_calls import GraniteParser, HermesParser, Llama3JsonParser, MistralParser
from server.formats.pythonic_calls import PythonicParser
from server.formats.tool_parser import mistral_call_id, openai_call_id

KNOWN = {"f": ("a", "b"), "g": (), "get_weather": ("city",)}
HERMES, LLAMA, MISTRAL, PYTHONIC = HermesParser, Llama3JsonParser, MistralParser, PythonicParser

# (parser, text, content, calls)
CASES = [
    (HERMES, "plain text", "plain text", []),
    (HERMES, "blanks at the end \n ", "blanks at the end \n ", []),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "x}\\"", "b": [1, 2]}}\n</tool_call>',
     "", [("f", '{"a": "x}\\"", "b": [1, 2]}')]),
    (HERMES, 'Sure.\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
     '<tool_call>{"arguments": {"k": 1}, "name": "g"}</tool_call>\n',
     "Sure.", [("f", "{}"), ("g", '{"k": 1}')]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call> and more', " and more", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', "", [("unknown", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "",
     [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "args": {"a": 1}, "id": "x"}</tool_call>', "",
     [("f", '{"args": {"a": 1}}')]),
    (HERMES, '<tool_call>{"city": "Oslo", "name": "f", "days": 3}</tool_call>', "",
     [("f", '{"city": "Oslo", "days": 3}')]),
    (HERMES, '<tool_call>{"name": "f", "note": "x", "arguments": {}}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    (HERMES, '<tool_call>{"na', '<tool_call>{"na', []),
    (HERMES, "a < b <tool <tool_call> not JSON </tool_call> tail",
     "a < b <tool <tool_call> not JSON </tool_call> tail", []),
    (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
     '<tool_call>{"name": 5, "arguments": {}}</tool_call>', []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"é": "日本 🙂"}}</tool_call>', "",
     [("f", '{"é": "日本 🙂"}')]),
    (HERMES, '<tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>', "<tool_call>",
     [("g", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}]<b>', "<b>", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f"]</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1, 2]}, ]', "",
     [("f", '{"a": [1, 2]}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "not an object"}</tool_call>', "",
     [("f", '"not an object"')]),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "",
     [("f", '{"a": 1}'), ("g", "{}")]),
    (LLAMA, '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    (LLAMA, 'Hm. <|python_tag|>{"name": "f", "parameters": {}}', "Hm.", [("f", "{}")]),
    (LLAMA, '{"name": "zz", "parameters": {}} hm', '{"name": "zz", "parameters": {}} hm', []),
    (LLAMA, ' {"x": 1}', ' {"x": 1}', []),
    (LLAMA, 'see {"name": "f"}', 'see {"name": "f"}', []),
    (LLAMA, '{"name": "f", "parameters": {}} tail; text', " tail; text", [("f", "{}")]),
    (LLAMA, '{"name": "f", "parameters": {}} ; text', " ; text", [("f", "{}")]),
    (LLAMA, '{"name": "f", "parameters": {}} ; ', " ;", [("f", "{}")]),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
     "", [("f", '{"a": 1}'), ("g", "{}")]),
    (MISTRAL, 'Hi [TOOL_CALLS] [{"name": "f", "arguments": {}}]', "Hi", [("f", "{}")]),
    (MISTRAL, '[TOOL_CALLS]f{"a": {"b": "}"}}[TOOL_CALLS]g[ARGS]{}', "",
     [("f", '{"a": {"b": "}"}}'), ("g", "{}")]),
    (MISTRAL, '[TOOL_CALLS]g[CALL_ID]abc[ARGS]{"x": 1}', "", [("g", '{"x": 1}')]),
    (MISTRAL, "[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
    (MISTRAL, "[TOOL_CALLS]  [1, 2]", "[TOOL_CALLS]  [1, 2]", []),
    (MISTRAL, "[TOOL_CALLS][1, 2]", "[TOOL_CALLS][1, 2]", []),
    (GraniteParser, 'Hm. <|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', "Hm.",
     [("f", '{"a": 1}')]),
    (PYTHONIC, "[f(a=[-1, -2.5, 'x'])]", "", [("f", '{"a": [-1, -2.5, "x"]}')]),
    (PYTHONIC, '[f(a=1, b="x, y)", c=[1, {"d": None}], e=true), g()]', "",
     [("f", '{"a": 1, "b": "x, y)", "c": [1, {"d": null}], "e": true}'), ("g", "{}")]),
    (PYTHONIC, "[get_weather(city='Paris', ok=False, n=-1.5, w=foo)] done", " done",
     [("get_weather", '{"city": "Paris", "ok": false, "n": -1.5, "w": "foo"}')]),
    (PYTHONIC, "<|python_start|>[f(a=1)]", "", [("f", '{"a": 1}')]),
    (PYTHONIC, '[f("oslo")]', "", [("f", '{"a": "oslo"}')]),
    (PYTHONIC, '[f("a=b", 2)]', "", [("f", '{"a": "a=b", "b": 2}')]),
    (PYTHONIC, "[f(x == 1)]", "", [("f", '{"a": "x == 1"}')]),
    (PYTHONIC, '[f(b=1, "x")]', "", [("f", '{"b": 1, "a": "x"}')]),
    (PYTHONIC, '[f(a=1, "x")]', "", [("f", '{"a": 1, "b": "x"}')]),
    (PYTHONIC, '[g("oslo")] tail', '[g("oslo")] tail', []),
    (PYTHONIC, '[f(**{"a": 1})]', '[f(**{"a": 1})]', []),
    (PYTHONIC, '[f(a=1), g("x")]', ', g("x")]', [("f", '{"a": 1}')]),
    (PYTHONIC, '[get_weather("Oslo", 3)]', "", [("get_weather", '{"city": "Oslo", "2": 3}')]),
    (PYTHONIC, '[f(a=1, **{"b": 2})]', "", [("f", '{"a": 1, "2": "**{\\"b\\": 2}"}')]),
    (PYTHONIC, '[f("cut', '[f("cut', []),
    (PYTHONIC, "[f(a=1", "", [("f", "")]),
    (PYTHONIC, "[f(a=1,)]", "", [("f", '{"a": 1}')]),
    (PYTHONIC, "[1, 2]", "[1, 2]", []),
    (PYTHONIC, "[zz(a=1)]", "[zz(a=1)]", []),
    (PYTHONIC, "[f", "[f", []),
    (PYTHONIC, "text [f(a=1)]", "text [f(a=1)]", []),
]  # fmt: skip
CUT_OFF = ('<tool_call>{"name": "f", "arguments": {"a": 1', "[f(a=1")
IDS = [f"{parser.__name__}-{number}" for number, (parser, *_) in enumerate(CASES)]


def parse(parser_class, pieces):
    """(content, calls) of a text that comes in these pieces."""
    numbers = itertools.count()
    parser = parser_class(KNOWN, lambda: f"id{next(numbers)}")
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    content = ""
    calls: list[Any] = []
    for event in events:
        match event:
            case Text(text):
                content += text
            case CallStart(index, call_id, name):
                assert (index, call_id) == (len(calls), f"id{len(calls)}")
                calls.append((name, ""))
            case CallArguments(index, text):
                assert text, "no empty events"
                assert index == len(calls) - 1, "calls come one after the other"
                calls[index] = (calls[index][0], calls[index][1] + text)
    return content, calls


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES, ids=IDS)
def test_whole_text(parser, text, content, calls):
    assert parse(parser, [text]) == (content, calls)


@pytest.mark.parametrize(("text", "calls"), [(text, calls) for _, text, _, calls in CASES], ids=IDS)
def test_arguments_of_a_call_that_was_not_cut_off_are_json(text, calls):
    whole = [] if text in CUT_OFF else [arguments for _, arguments in calls]
    assert all(json.loads(arguments) is not None for arguments in whole)


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES, ids=IDS)
@pytest.mark.sampled(16)
def test_cut_at_every_two_positions(parser, text, content, calls):
    for i in range(len(text) + 1):
        for j in range(i, len(text) + 1, 3 if len(text) > 60 else 1):
            pieces = [text[:i], text[i:j], text[j:]]
            assert parse(parser, pieces) == (content, calls), pieces
    assert parse(parser, list(text)) == (content, calls)


def test_arguments_are_given_as_they_come():
    parser = HermesParser(KNOWN)
    parser.feed('<tool_call>{"name": "f", "arguments": ')
    assert parser.feed('{"a": "xy') == [CallArguments(0, '{"a": "xy')]
    assert parser.feed('z"') == [CallArguments(0, 'z"')]


def test_content_is_given_as_it_comes():
    parser = HermesParser(KNOWN)
    assert parser.feed("Hello") == [Text("Hello")]
    assert parser.feed(" <to") == []
    assert parser.feed("ast>") == [Text(" <toast>")]


def test_call_ids_are_of_each_family_own_form():
    assert openai_call_id().startswith("call_")
    assert len({openai_call_id() for _ in range(100)}) == 100
    assert all(len(one) == 9 and one.isalnum() for one in (mistral_call_id() for _ in range(100)))


def test_what_goes_on_too_long_to_be_a_name_is_text():
    text = "[TOOL_CALLS] " + "n" * 2000
    call = '[TOOL_CALLS]f{"a": 1}'
    for pieces in ([text + " " + call], list(text + " " + call), [text, call]):
        assert parse(MISTRAL, pieces) == (text, [("f", '{"a": 1}')])


def test_a_number_that_json_does_not_have_is_text():
    assert parse(PYTHONIC, ["[f(a=1e999, b=[1e999])]"]) == (
        "",
        [("f", '{"a": "1e999", "b": "[1e999]"}')],
    )


def test_a_value_that_is_a_long_list_is_json_still():
    text = "[" + ", ".join(map(str, range(50_000))) + "]"
    _, [(name, arguments)] = parse(PYTHONIC, [f"[f(a={text}, b=[True, 'x'])]"])
    assert name == "f"
    assert json.loads(arguments) == {"a": list(range(50_000)), "b": [True, "x"]}


@pytest.mark.parametrize("parser", [HERMES, LLAMA, MISTRAL])
def test_a_name_that_is_nested_deeply_is_none(parser):
    text = parser.markers[0] + '{"name": ' + "[" * 100_000 + "]" * 100_000 + ', "x": 1}'
    assert parse(parser, [text]) == (text, [])
