"""/v1/messages through the official Anthropic client, streamed and whole, on scripted text."""

from __future__ import annotations

import anthropic
import pytest

from tests.server.server_kit import Served, error_body, say, sim_server

WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def create(served, content, **fields):
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    fields.setdefault("max_tokens", 200)
    return served.anthropic.messages.create(model=served.model, messages=messages, **fields)


def test_text(sim):
    message = create(sim, say("Hello there."), system="Be brief.")
    assert (message.type, message.role, message.stop_reason) == ("message", "assistant", "end_turn")
    assert [block.text for block in message.content] == ["Hello there."]
    assert message.usage.output_tokens == len("Hello there.") + 1
    assert message.stop_sequence is None


def test_stop_reasons(sim):
    cut = create(sim, say("Hello there."), max_tokens=5)
    assert (cut.content[0].text, cut.stop_reason) == ("Hello", "max_tokens")
    stopped = create(sim, say("Hello there."), stop_sequences=["lo"])
    assert (stopped.content[0].text, stopped.stop_reason) == ("Hel", "stop_sequence")
    assert stopped.stop_sequence == "lo"
    called = create(sim, say(CALL), tools=[WEATHER])
    assert called.stop_reason == "tool_use"


def test_cached_prompt_tokens_are_counted_apart(sim):
    text = say("ok") + "x" * 100
    first, second = create(sim, text).usage, create(sim, text).usage
    total = first.input_tokens + first.cache_read_input_tokens
    assert second.cache_read_input_tokens > 0
    assert second.input_tokens + second.cache_read_input_tokens == total
    count = sim.anthropic.messages.count_tokens(
        model=sim.model, messages=[{"role": "user", "content": text}]
    )
    assert count.input_tokens == total


def test_stream_is_nested_and_the_client_s_accumulation_agrees(sim):
    kinds = []
    with sim.anthropic.messages.stream(
        model=sim.model,
        max_tokens=300,
        messages=[{"role": "user", "content": say("Let me see.\n" + CALL)}],
        tools=[WEATHER],
    ) as stream:
        kinds = [event.type for event in stream if event.type not in ("text", "input_json")]
        final = stream.get_final_message()
    squeezed = [kind for i, kind in enumerate(kinds) if kind != (kinds[i - 1] if i else None)]
    assert squeezed == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_stop"] * 2,
        "message_delta",
        "message_stop",
    ]
    text, call = final.content
    assert (text.type, text.text) == ("text", "Let me see.")
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens > 0


def test_whole_equals_stream(sim):
    text = say(CALL + "\n" + CALL.replace("Paris", "Rome"))
    whole = create(sim, text, tools=[WEATHER])
    with sim.anthropic.messages.stream(
        model=sim.model, max_tokens=200, tools=[WEATHER],
        messages=[{"role": "user", "content": text}],
    ) as stream:  # fmt: skip
        streamed = stream.get_final_message()
    assert [block.input for block in whole.content] == [{"city": "Paris"}, {"city": "Rome"}]
    assert [block.input for block in streamed.content] == [block.input for block in whole.content]
    assert len({block.id for block in whole.content}) == 2


def test_conversation_with_results_goes_on(sim):
    first = create(sim, say(CALL), tools=[WEATHER])
    history = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [block.to_dict() for block in first.content]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": first.content[0].id,
             "content": [{"type": "text", "text": "snow"}]},
            {"type": "text", "text": say("Wear boots.")}]},
    ]  # fmt: skip
    message = create(sim, history, tools=[WEATHER])
    assert message.content[0].text == "Wear boots."


def test_forced_and_forbidden_tools(sim):
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        [block] = create(
            sim, say("No."), tools=[WEATHER],
            tool_choice={**choice, "disable_parallel_tool_use": True},
        ).content  # fmt: skip
        assert (block.type, set(block.input)) == ("tool_use", {"city"})
    [block] = create(sim, say(CALL), tools=[WEATHER], tool_choice={"type": "none"}).content
    assert block.text == CALL


def test_assistant_s_beginning_is_gone_on_from(sim):
    opened = [{"role": "user", "content": say("x")}]
    begun = [*opened, {"role": "assistant", "content": "The answer is"}]
    count = sim.anthropic.messages.count_tokens
    alone = count(model=sim.model, messages=opened).input_tokens
    more = count(model=sim.model, messages=begun).input_tokens
    assert more - alone == len("The answer is"), "no turn is closed or opened after it"
    assert create(sim, begun).content[0].text == "x"


def test_thinking_is_a_block_of_its_own(thinker):
    text = say("<think>hm, hm</think>Yes.")
    thought, answer = create(thinker, text).content
    assert (thought.type, thought.thinking) == ("thinking", "hm, hm")
    assert answer.text == "Yes."
    enabled = create(
        thinker, say("hm</think>Yes."), max_tokens=2000,
        thinking={"type": "adaptive"},
    )  # fmt: skip
    assert [block.type for block in enabled.content] == ["thinking", "text"]
    again = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": [block.to_dict() for block in enabled.content]},
        {"role": "user", "content": say("Sure.")},
    ]
    assert create(thinker, again).content[0].text == "Sure."


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "bot", "content": "x"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"extra_body": {"temperature": -1.0}}, "temperature"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"tools": [WEATHER], "tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "'x'"),
        ({"system": 5}, "system"),
        ({"thinking": 5}, "thinking"),
    ],
)
def test_wrong_fields_are_refused_in_anthropic_s_form(sim, fields, words):
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}], **fields}
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError, match=words) as caught:
            sim.anthropic.messages.create(model=sim.model, stream=stream, **body)
        assert error_body(caught.value)["type"] == "error"
        assert error_body(caught.value)["error"]["type"] == "invalid_request_error"


def test_unknown_model_and_missing_key():
    with sim_server(api_key="secret") as served:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            create(served, "Hi")
        assert error_body(caught.value)["error"]["type"] == "authentication_error"
        allowed = Served(served.url, api_key="secret")
        assert create(allowed, say("yes")).content[0].text == "yes"
        allowed.model = "other"
        with pytest.raises(anthropic.NotFoundError) as missing:
            create(allowed, "Hi")
        assert error_body(missing.value)["error"]["type"] == "not_found_error"
        allowed.close()
