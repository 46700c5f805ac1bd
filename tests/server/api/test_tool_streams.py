"""Tool calls through the official clients: one at most where that is asked for, and arguments that
come while the model is still writing them."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from typing import Any

import pytest

from runtime.simulation.sim_runner import SimRunner
from tests.server.server_kit import CHATML_TOOLS, say, say_what_is_asked, sim_server

PARAMETERS: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
FUNCTION: Any = {"type": "function", "strict": False, **WEATHER["function"]}
TOOL: Any = {"name": "get_weather", "input_schema": PARAMETERS}
CITY = "Paris, the one on the Seine"
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{CITY}"}}}}\n</tool_call>'
TWO = say("Let me see.\n" + CALL + "\n" + CALL.replace("Paris", "Rome"))


def names_of(blocks):
    return [block.name for block in blocks if block.type in ("tool_use", "function_call")]


@pytest.mark.parametrize("family", ["hermes", "llama3_json", "pythonic"])
def test_one_call_at_most_in_every_protocol(family):
    """In the first family the model cannot begin a second call; in the others it may, and nobody is
    told. The first family's calls stand in text."""
    calls = {
        "hermes": TWO,
        "llama3_json": say('{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name":'
                           ' "get_weather", "parameters": {"city": "Rome"}}'),
        "pythonic": say('[get_weather(city="Paris"), get_weather(city="Rome")]'),
    }  # fmt: skip
    text = calls[family]
    asked: Any = [{"role": "user", "content": text}]
    with sim_server(tool_call_parser=family) as served:
        both = served.chat(text, tools=[WEATHER]).choices[0].message.tool_calls
        assert len(both) == 2, "as many as the model likes, unless told otherwise"
        answer = served.chat(text, tools=[WEATHER], parallel_tool_calls=False)
        [call] = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"].startswith("Paris")
        assert answer.choices[0].finish_reason == "tool_calls"
        chunks = served.chat(text, tools=[WEATHER], parallel_tool_calls=False, stream=True)
        pieces = [c.choices[0].delta.tool_calls or [] for c in chunks if c.choices]
        assert {piece.index for one in pieces for piece in one} == {0}
        message = served.anthropic.messages.create(
            model=served.model, max_tokens=400, messages=asked, tools=[TOOL],
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        )  # fmt: skip
        assert (names_of(message.content), message.stop_reason) == (["get_weather"], "tool_use")
        response = served.openai.responses.create(
            model=served.model, input=text, parallel_tool_calls=False,
            tools=[FUNCTION],
        )  # fmt: skip
        assert names_of(response.output) == ["get_weather"]
        if family == "hermes":
            told = say("It rains.")
            plain = served.chat(told, tools=[WEATHER], parallel_tool_calls=False).choices[0]
            assert (plain.message.content, plain.message.tool_calls) == ("It rains.", None)
            assert answer.usage.completion_tokens <= len("Let me see.\n" + CALL) + 1


@contextmanager
def waiting_server(**options):
    """A server whose model stops in the middle of a call's arguments until it is let go on; gives
    the server and what lets it."""
    go_on = threading.Event()
    waited = []

    def script(request, index):
        if index == CALL.index("Seine"):
            waited.append(go_on.wait(20))
        return say_what_is_asked(request, index)

    with_thread = {"step_seconds": lambda batch: 0.0}
    with sim_server(CHATML_TOOLS, script=script, runner_options=with_thread) as served:
        try:
            yield served, go_on
        finally:
            go_on.set()
    assert waited == [True], "nothing came before the model went on"


def read(events, argument_of, go_on):
    """The pieces of arguments in a stream; the model goes on after the fifth."""
    pieces = []
    for event in events:
        if piece := argument_of(event):
            pieces.append(piece)
        if len(pieces) == 5:
            go_on.set()
    return pieces


def test_openai_s_arguments_come_while_they_are_made():
    with waiting_server() as (served, go_on):
        chunks = served.chat(say(CALL), tools=[WEATHER], stream=True)

        def argument_of(chunk):
            calls = chunk.choices[0].delta.tool_calls if chunk.choices else None
            return calls[0].function.arguments if calls else ""

        pieces = read(chunks, argument_of, go_on)
    assert json.loads("".join(pieces)) == {"city": CITY}


def test_anthropic_s_arguments_come_while_they_are_made():
    with waiting_server() as (served, go_on):
        events = served.anthropic.messages.create(
            model=served.model, max_tokens=400, tools=[TOOL], stream=True,
            messages=[{"role": "user", "content": say(CALL)}],
        )  # fmt: skip

        def argument_of(event):
            if event.type != "content_block_delta" or event.delta.type != "input_json_delta":
                return ""
            return event.delta.partial_json

        pieces = read(events, argument_of, go_on)
    assert json.loads("".join(pieces)) == {"city": CITY}


def test_responses_arguments_come_while_they_are_made():
    with waiting_server() as (served, go_on):
        events = served.openai.responses.create(
            model=served.model, input=say(CALL), stream=True,
            tools=[FUNCTION],
        )  # fmt: skip
        done = []

        def argument_of(event):
            if event.type == "response.function_call_arguments.done":
                done.append(event.arguments)
            named = event.type == "response.function_call_arguments.delta"
            return event.delta if named else ""

        pieces = read(events, argument_of, go_on)
    assert json.loads("".join(pieces)) == {"city": CITY}
    assert done == ["".join(pieces)]


EFFORT_TEMPLATE = (
    "Reasoning: {{ reasoning_effort or 'as usual' }}\n"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)


class SeeingRunner(SimRunner):
    """Keeps the prompts that it has computed something of."""

    def launch(self, batch):
        self.prompts = [bytes(list(request.input_ids)).decode() for request in batch.requests]
        return super().launch(batch)


def test_reasoning_effort_reaches_a_template_that_knows_it():
    asked: Any = [{"role": "user", "content": "Hi"}]
    with sim_server(EFFORT_TEMPLATE, SeeingRunner) as served:
        runner: Any = served.service.engine.runner

        def first_line():
            return runner.prompts[0].partition("\n")[0]

        for effort in ("minimal", "high"):
            served.chat(asked, reasoning_effort=effort)
            assert first_line() == f"Reasoning: {effort}"
            served.openai.responses.create(
                model=served.model, input=asked, reasoning={"effort": effort}
            )
            assert first_line() == f"Reasoning: {effort}"
        served.anthropic.messages.create(
            model=served.model, max_tokens=20, messages=asked,
            extra_body={"output_config": {"effort": "low"}},
        )  # fmt: skip
        assert first_line() == "Reasoning: low"
        served.chat(asked)
        assert first_line() == "Reasoning: as usual"
