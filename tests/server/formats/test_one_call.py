"""Answers that may call one tool at most: whatever the model writes, and in every family's way."""

from __future__ import annotations

import pytest

from server.formats.events import CallArguments, CallStart, Text
from server.formats.model_format import AnswerParser
from server.formats.tool_families import TOOL_FAMILIES, answer_source
from server.formats.tools import parse_tools
from tests.server.grammars.library import compiled, takes
from tests.values import present

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("look", "find")
]
CALLS = [("look", {"at": 1}), ("find", {"what": "x"})]


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize("family", TOOL_FAMILIES)
def test_what_follows_the_first_call_is_told_to_nobody(family, step):
    request = parse_tools(TOOLS, "auto", parallel=False)
    assert request is not None
    parser = AnswerParser(tools=TOOL_FAMILIES[family].read(request), one_call=True)
    text = TOOL_FAMILIES[family].written(CALLS) + " And that is all."
    events = [
        event
        for start in range(0, len(text), step)
        for event in parser.read(text[start : start + step], ended=start + step >= len(text))
    ]
    started = [event.name for event in events if isinstance(event, CallStart)]
    arguments = "".join(event.text for event in events if isinstance(event, CallArguments))
    assert (started, arguments) == (["look"], '{"at": 1}')
    assert "".join(event.text for event in events if isinstance(event, Text)).strip() == ""


@pytest.mark.parametrize("family", TOOL_FAMILIES)
def test_several_calls_are_told_where_they_may_be(family):
    request = parse_tools(TOOLS, "auto")
    assert request is not None
    parser = AnswerParser(tools=TOOL_FAMILIES[family].read(request))
    events = parser.read(TOOL_FAMILIES[family].written(CALLS), ended=True)
    assert [e.name for e in events if isinstance(e, CallStart)] == ["look", "find"]


@pytest.mark.parametrize("family", [name for name, one in TOOL_FAMILIES.items() if one.in_text])
def test_a_grammar_lets_no_second_call_begin(family):
    one = TOOL_FAMILIES[family]
    source = answer_source(present(parse_tools(TOOLS, "auto", parallel=False)), one, None, {})
    matcher = compiled(source)
    call, other = one.written(CALLS[:1]), one.written(CALLS[1:])
    assert takes(matcher, "No call at all.")
    assert takes(matcher, call)
    assert takes(matcher, "Let me see. " + other)
    assert not takes(matcher, call + other)
    assert not takes(matcher, call + "\n" + other)
    assert not takes(matcher, one.written(CALLS))
    several = answer_source(present(parse_tools(TOOLS, "auto")), one, None, {})
    assert several is None, "several calls are as free as text"


@pytest.mark.parametrize("family", [name for name, one in TOOL_FAMILIES.items() if not one.in_text])
def test_a_family_whose_calls_look_like_text_has_no_such_grammar(family):
    request = present(parse_tools(TOOLS, "auto", parallel=False))
    assert answer_source(request, TOOL_FAMILIES[family], None, {}) is None
