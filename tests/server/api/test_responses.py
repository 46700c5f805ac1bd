"""/v1/responses through the official client: the stream's events and the whole, on scripted text."""

from __future__ import annotations

import json

import openai
import pytest

from server.api.incoming import read_value
from server.api.responses import ResponseBody
from server.formats.conversation import parse_messages
from server.generation.params import ApiLimits
from tests.server.server_kit import say

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def create(served, given, **fields):
    return served.openai.responses.create(model=served.model, input=given, **fields)


def test_text(sim):
    response = create(sim, say("Hello there."), metadata={"k": "v"})
    assert response.output_text == "Hello there."
    assert (response.object, response.status) == ("response", "completed")
    assert response.metadata == {"k": "v"}
    assert response.error is None
    assert response.incomplete_details is None
    [message] = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    usage = response.usage
    assert usage.output_tokens == len("Hello there.") + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_length_makes_it_incomplete(sim):
    response = create(sim, say("Hello there."), max_output_tokens=5)
    assert response.output_text == "Hello"
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"


def test_stream_of_text_is_typed_numbered_and_nested(sim):
    events = list(create(sim, say("Hello"), stream=True))
    kinds = [event.type for event in events]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * (len(kinds) - 8),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Hello"
    assert events[-4].text == "Hello"
    ids = {e.item_id for e in events if hasattr(e, "item_id")}
    assert ids == {events[2].item.id} == {events[-1].response.output[0].id}
    assert events[0].response.id == events[-1].response.id
    assert events[0].response.status == "in_progress"


def test_client_s_own_accumulation_agrees_with_the_last_event(sim):
    text = say("Let me see.\n" + CALL)
    with sim.openai.responses.stream(model=sim.model, input=text, tools=[WEATHER]) as stream:
        last = list(stream)[-1]
        final = stream.get_final_response()
    assert last.type == "response.completed"
    assert final.output_text == "Let me see."
    message, call = final.output
    assert (message.type, call.type) == ("message", "function_call")
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    assert call.status == "completed"


def test_calls_streamed_and_whole(sim):
    text = say(CALL + "\n" + CALL.replace("Paris", "Rome"))
    response = create(sim, text, tools=[WEATHER])
    assert [item.type for item in response.output] == ["function_call"] * 2
    assert [json.loads(item.arguments)["city"] for item in response.output] == ["Paris", "Rome"]
    assert len({item.call_id for item in response.output}) == 2
    arguments: dict[int, str] = {}
    for event in create(sim, text, tools=[WEATHER], stream=True):
        if event.type == "response.function_call_arguments.delta":
            arguments[event.output_index] = arguments.get(event.output_index, "") + event.delta
        elif event.type == "response.function_call_arguments.done":
            assert event.arguments == arguments[event.output_index]
    assert list(arguments.values()) == [item.arguments for item in response.output]


def test_conversation_with_calls_goes_on(sim):
    first = create(sim, say(CALL), tools=[WEATHER])
    call = first.output[0]
    history = [
        {"role": "user", "content": "Weather in Paris?"},
        *[item.to_dict() for item in first.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": say("Rain.")},
    ]
    response = create(sim, history, tools=[WEATHER], instructions="Be brief.")
    assert response.output_text == "Rain."


def test_required_and_named_tools(sim):
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        response = create(sim, say("No."), tools=[WEATHER], tool_choice=choice)
        assert response.output[0].type == "function_call"
        assert set(json.loads(response.output[0].arguments)) == {"city"}


def test_json_schema_as_text_format(sim):
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    wish = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    response = create(sim, say('{"a": 1}'), text=wish)
    assert json.loads(response.output_text) == {"a": 1}
    assert response.text.format.name == "x"


def test_reasoning_is_an_item_of_its_own(thinker):
    text = say("<think>hm, hm</think>Yes.")
    response = create(thinker, text)
    reasoning, message = response.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "hm, hm")
    assert message.content[0].text == "Yes."
    assert response.usage.output_tokens_details.reasoning_tokens >= len("hm, hm")
    deltas = [e.delta for e in create(thinker, text, stream=True)
              if e.type == "response.reasoning_text.delta"]  # fmt: skip
    assert "".join(deltas) == "hm, hm"
    # and it may come back in the next request's input
    again = [{"role": "user", "content": "?"}, *[item.to_dict() for item in response.output],
             {"role": "user", "content": say("Sure.")}]  # fmt: skip
    assert create(thinker, again).output_text == "Sure."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"temperature": -1}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"metadata": "x"}, "metadata"),
        ({"reasoning": 5}, "reasoning"),
    ],
)
def test_wrong_fields_are_refused_by_name(sim, fields, param):
    body = {"input": "Hi", **fields}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            sim.openai.responses.create(model=sim.model, stream=stream, **body)
        assert caught.value.param == param


def test_input_items_become_messages():
    body = {
        "instructions": "S",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "U"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "R"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
        ],
    }
    limits = ApiLimits(model="m", vocab_size=100, context_length=1000)
    system, user, assistant, result = parse_messages(
        read_value(ResponseBody, body, limits).conversation().messages
    )
    assert system == {"role": "system", "content": "S"}
    assert user["content"] == "U"
    assert assistant["reasoning_content"] == "R"
    assert [call["id"] for call in assistant["tool_calls"]] == ["c1", "c2"]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "1"}
