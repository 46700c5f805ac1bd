"""smolagents: a model, an agent that calls tools, and one that writes code."""

from __future__ import annotations

from common import (
    CALL,
    KEY,
    MODEL,
    PERSON,
    PERSON_SCHEMA,
    QUESTION,
    TEXT,
    URL,
    call,
    equal,
    run,
    say,
)
from smolagents import ChatMessage, CodeAgent, LogLevel, OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(model_id=MODEL, api_base=URL + "/v1", api_key=KEY)
FINAL = call("final_answer", '{"answer": "Rain in Paris."}')


@tool
def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name.
    """
    return FINAL if city == "Paris" else ""


def asked(text: str) -> list:
    return [ChatMessage(role="user", content=[{"type": "text", "text": text}])]


def whole_and_stream() -> None:
    equal(model.generate(asked(QUESTION)).content, TEXT)
    deltas = model.generate_stream(asked(QUESTION))
    equal("".join(delta.content or "" for delta in deltas), TEXT)


def structured() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON_SCHEMA}}
    equal(model.generate(asked(say(PERSON)), response_format=schema).content, PERSON)


def tools() -> None:
    for streamed in (False, True):
        agent = ToolCallingAgent(
            tools=[get_weather], model=model, verbosity_level=LogLevel.OFF, stream_outputs=streamed
        )
        equal(agent.run(CALL, max_steps=3), "Rain in Paris.")


def code_in_two_turns() -> None:
    agent = CodeAgent(tools=[], model=model, verbosity_level=LogLevel.OFF)
    equal(agent.run(say("<code>\nfinal_answer(6 * 7)\n</code>"), max_steps=1), 42)
    again = say("<code>\nfinal_answer(7 * 7)\n</code>")
    equal(agent.run(again, reset=False, max_steps=1), 49)


run(whole_and_stream, structured, tools, code_in_two_turns)
