"""Structured output, tools and reasoning through the official OpenAI client, streamed and whole."""

from __future__ import annotations

import json

import openai
import pydantic
import pytest

from tests.server.server_kit import say

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def streamed(served, content, **fields):
    """(deltas, finish reason) of a streamed chat with one choice."""
    chunks = list(served.chat(content, stream=True, **fields))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    return [choice.delta for choice in choices], choices[-1].finish_reason


def joined_calls(deltas):
    """(name, arguments) of each call in a stream, and their ids."""
    calls: dict[int, tuple[str, str]] = {}
    ids: dict[int, str] = {}
    for delta in deltas:
        for piece in delta.tool_calls or ():
            name, arguments = calls.get(piece.index, ("", ""))
            calls[piece.index] = (
                name + (piece.function.name or ""),
                arguments + (piece.function.arguments or ""),
            )
            if piece.id:
                assert piece.index not in ids, "an id is sent once"
                ids[piece.index] = piece.id
    return [calls[i] for i in sorted(calls)], ids


def test_a_call_in_the_text_becomes_a_tool_call(sim):
    answer = sim.chat(say("Let me see.\n" + CALL), tools=[WEATHER])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_streamed_arguments_come_in_pieces_and_equal_the_whole(sim):
    text = say(CALL + "\n" + CALL.replace("Paris", "Rome"))
    deltas, finish = streamed(sim, text, tools=[WEATHER])
    whole = sim.chat(text, tools=[WEATHER]).choices[0].message.tool_calls
    calls, ids = joined_calls(deltas)
    assert calls == [(call.function.name, call.function.arguments) for call in whole]
    assert len(set(ids.values())) == 2
    assert finish == "tool_calls"
    assert deltas[0].role == "assistant"
    assert sum(bool(delta.tool_calls) for delta in deltas) > 4, "arguments come as they are made"
    assert not any("tool_call" in (delta.content or "") for delta in deltas)


def test_without_tools_a_call_is_text(sim):
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        message = sim.chat(say(CALL), **fields).choices[0].message
        assert message.content == CALL
        assert message.tool_calls is None


def test_plain_answer_with_tools_offered(sim):
    choice = sim.chat(say("It rains."), tools=[WEATHER]).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("It rains.", "stop")
    assert choice.message.tool_calls is None


@pytest.mark.parametrize("model", ["sim", "thinker"])
def test_tools_calls_and_results_are_in_the_prompt(model, request):
    served = request.getfixturevalue(model)
    history = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function",
             "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "snow"},
    ]  # fmt: skip
    with_tools = served.chat(history, tools=[WEATHER]).usage.prompt_tokens
    without = served.chat(history).usage.prompt_tokens
    no_result = served.chat(history[:2]).usage.prompt_tokens
    assert with_tools > without + len("get_weather") + len("The weather of a city")
    assert without > no_result


def test_required_makes_a_call_whatever_the_model_would_say(sim):
    choice = sim.chat(say("No, thank you."), tools=[WEATHER], tool_choice="required").choices[0]
    [call] = choice.message.tool_calls[:1]
    assert call.function.name == "get_weather"
    assert not choice.message.content


@pytest.mark.parametrize("length", [1, 6, len("<tool_call>"), 20])
def test_of_a_required_call_that_is_cut_short_no_marker_is_told(sim, length):
    tool = {"name": "get_weather", "input_schema": {"type": "object"}}
    fields = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": length}
    choice = sim.chat(say(CALL), **fields).choices[0]
    assert (choice.message.content or "", choice.finish_reason) == ("", "length")
    deltas, finish = streamed(sim, say(CALL), **fields)
    assert ("".join(delta.content or "" for delta in deltas), finish) == ("", "length")
    message = sim.anthropic.messages.create(
        model=sim.model,
        max_tokens=length,
        messages=[{"role": "user", "content": say(CALL)}],
        tools=[tool],
        tool_choice={"type": "any"},
    )
    assert message.stop_reason == "max_tokens"
    assert "".join(block.text for block in message.content if block.type == "text") == ""


def test_named_tool_is_the_one_that_is_called_and_once(sim):
    wish = {"type": "function", "function": {"name": "get_time"}}
    choice = sim.chat(say("No."), tools=[WEATHER, CLOCK], tool_choice=wish, max_tokens=200).choices[
        0
    ]
    assert [call.function.name for call in choice.message.tool_calls] == ["get_time"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_regex": "(["}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "nonsense ::="}, "guided_grammar"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ],
)  # fmt: skip
def test_wrong_fields_are_refused_by_name(sim, fields, param):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            sim.chat("Hi", stream=stream, extra_body=fields)
        assert caught.value.param == param
        assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    "keyword",
    ["not", "if", "uniqueItems", "contains", "propertyNames", "dependentRequired",
     "dependentSchemas", "unevaluatedProperties", "unevaluatedItems"],
)  # fmt: skip
def test_keyword_that_cannot_be_enforced_is_named(sim, keyword):
    value = {
        "uniqueItems": True,
        "dependentRequired": {"a": ["b"]},
        "dependentSchemas": {"a": {}},
    }.get(keyword, {"type": "string"})
    with pytest.raises(openai.BadRequestError, match=keyword):
        sim.chat("Hi", extra_body={"guided_json": {keyword: value}})


def test_json_schema_wins_over_the_model(sim):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    wish = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    choice = sim.chat(say('{"a": 2}'), response_format=wish).choices[0]
    assert (choice.message.content, choice.finish_reason) == ('{"a": 2}', "stop")
    forced = sim.chat(say("Sorry, no."), response_format=wish, max_tokens=200).choices[0]
    assert json.loads(forced.message.content)["a"] in (1, 2)


def test_every_way_to_ask_for_a_grammar(sim):
    for fields, allowed in (
        ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
        ({"guided_regex": "(yes|no)!"}, ("yes!", "no!")),
        ({"guided_grammar": 'start: "yes" | "no"'}, ("yes", "no")),
        ({"guided_grammar": 'root ::= "yes" | "no"'}, ("yes", "no")),
        ({"guided_json": {"enum": ["yes", "no"]}}, ('"yes"', '"no"')),
        ({"guided_json": '{"const": 5}'}, ("5",)),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
        ({"structured_outputs": {"regex": "a{3}"}}, ("aaa",)),
    ):
        for stream in (False, True):
            prompt = say("maybe")
            if stream:
                deltas, finish = streamed(sim, prompt, extra_body=fields)
                text = "".join(delta.content or "" for delta in deltas)
            else:
                choice = sim.chat(prompt, extra_body=fields).choices[0]
                text, finish = choice.message.content, choice.finish_reason
            assert text in allowed, fields
            assert finish == "stop"
        answer = sim.openai.completions.create(
            model=sim.model, prompt=prompt, max_tokens=32, extra_body=fields
        )
        assert answer.choices[0].text in allowed


def test_structural_tag_rules_inside_the_tags_only(sim):
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}],
        "triggers": ["<n>"],
    }
    free = sim.chat(say("one <n>1</n> two"), extra_body={"response_format": tag})
    assert free.choices[0].message.content == "one <n>1</n> two"
    ruled = sim.chat(say("one <n>x</n> two"), max_tokens=12, extra_body={"response_format": tag})
    text = ruled.choices[0].message.content
    assert text.startswith("one <n>")
    assert "x" not in text


def test_grammar_with_several_choices_stops_and_min_tokens(sim):
    choices = sim.chat(say("no"), n=3, extra_body={"guided_choice": ["yes", "no"]}).choices
    assert [choice.message.content for choice in choices] == ["no"] * 3
    # The grammar leaves no way but the end: it wins over min_tokens.
    early = sim.chat(say("no"), extra_body={"guided_choice": ["no"], "min_tokens": 20})
    assert early.choices[0].message.content == "no"
    # Where it leaves one, min_tokens holds.
    late = sim.chat(say("aa"), extra_body={"guided_regex": "a+", "min_tokens": 6}, max_tokens=9)
    assert len(late.choices[0].message.content) >= 6
    cut = sim.chat(say('{"a": 1}'), stop="1", response_format={"type": "json_object"}).choices[0]
    assert (cut.message.content, cut.finish_reason) == ('{"a": ', "stop")


def test_grammar_that_ends_on_the_last_allowed_token_is_a_stop(sim):
    choice = sim.chat(say("yes"), max_tokens=3, extra_body={"guided_choice": ["yes"]}).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("yes", "stop")


def test_reasoning_is_told_apart_streamed_and_whole(thinker):
    text = say("<think>\nhm, hm\n</think>\n\nForty-two.")
    message = thinker.chat(text).choices[0].message
    assert message.content == "Forty-two."
    assert message.reasoning_content == "hm, hm"
    deltas, finish = streamed(thinker, text)
    assert "".join(delta.content or "" for delta in deltas) == "Forty-two."
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == "hm, hm"
    assert finish == "stop"


def test_prompt_that_opens_the_reasoning(thinker):
    fields = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    message = thinker.chat(say("hm</think>yes"), **fields).choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", "yes")


def test_grammar_rules_what_follows_the_reasoning(thinker):
    body = {"chat_template_kwargs": {"enable_thinking": True}, "guided_choice": ["yes", "no"]}
    message = thinker.chat(say("I think so.</think>yes"), extra_body=body).choices[0].message
    assert (message.reasoning_content, message.content) == ("I think so.", "yes")


def test_reasoning_then_a_tool_call(thinker):
    choice = thinker.chat(say("<think>hm</think>\n" + CALL), tools=[WEATHER]).choices[0]
    assert choice.message.reasoning_content == "hm"
    assert choice.message.content is None
    assert choice.message.tool_calls[0].function.name == "get_weather"
    assert choice.finish_reason == "tool_calls"


class Weather(pydantic.BaseModel):
    city: str
    days: int | None


def test_the_client_s_own_parsing_of_schemas_and_tools(sim):
    said = '{"city": "Oslo", "days": null}'
    parsed = sim.openai.chat.completions.parse(
        model=sim.model,
        messages=[{"role": "user", "content": say(said)}],
        response_format=Weather,
    )
    assert parsed.choices[0].message.parsed == Weather(city="Oslo", days=None)
    call = f'<tool_call>\n{{"name": "Weather", "arguments": {said}}}\n</tool_call>'
    with sim.openai.chat.completions.stream(
        model=sim.model,
        messages=[{"role": "user", "content": say(call)}],
        tools=[openai.pydantic_function_tool(Weather)],
    ) as stream:
        deltas = [e for e in stream if e.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion()
    assert len(deltas) > 3
    [done] = final.choices[0].message.tool_calls
    assert done.function.parsed_arguments == Weather(city="Oslo", days=None)
    response = sim.openai.responses.parse(model=sim.model, input=say(said), text_format=Weather)
    assert response.output_parsed == Weather(city="Oslo", days=None)


def test_tokenize_counts_the_tools_too(thinker):
    messages = [{"role": "user", "content": "Hi"}]
    used = thinker.chat(messages, tools=[WEATHER]).usage.prompt_tokens
    body = {"messages": messages, "tools": [WEATHER]}
    found = thinker.openai.post(
        thinker.url + "/tokenize", body=body, cast_to=openai.BaseModel
    ).to_dict()
    assert found["count"] == used
