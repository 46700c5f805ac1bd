"""Haystack's OpenAI generators."""

from __future__ import annotations

import os

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

from common import CALL, FORECAST, KEY, MODEL, PERSON, QUESTION, TEXT, URL, equal, run, say
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    born: int


def generator(**more) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(
        api_key=Secret.from_token(KEY), model=MODEL, api_base_url=URL + "/v1", **more
    )


def asked(text: str) -> list:
    return [ChatMessage.from_user(text)]


def get_weather(city: str) -> str:
    """The weather of a city."""
    return say(FORECAST + city)


def stream() -> None:
    pieces: list = []
    found = generator(streaming_callback=lambda chunk: pieces.append(chunk.content))
    equal(found.run(asked(QUESTION))["replies"][0].text, TEXT)
    equal("".join(pieces), TEXT)


def tools_in_two_turns() -> None:
    weather = create_tool_from_function(get_weather)
    own = generator(tools=[weather])
    (answer,) = own.run(asked(CALL))["replies"]
    (made,) = answer.tool_calls
    equal((made.tool_name, made.arguments), ("get_weather", {"city": "Paris"}))
    result = ChatMessage.from_tool(get_weather("Paris"), origin=made)
    (final,) = own.run([*asked(CALL), answer, result])["replies"]
    equal(final.text, FORECAST + "Paris")


def agent() -> None:
    own = Agent(chat_generator=generator(), tools=[create_tool_from_function(get_weather)])
    equal(own.run(messages=asked(CALL))["last_message"].text, FORECAST + "Paris")


def structured() -> None:
    own = generator(generation_kwargs={"response_format": Person})
    (answer,) = own.run(asked(say(PERSON)))["replies"]
    equal(Person.model_validate_json(answer.text), Person(name="Ada", born=1815))


async def asynchronous() -> None:
    found = await generator().run_async(asked(QUESTION))
    equal(found["replies"][0].text, TEXT)


run(stream, tools_in_two_turns, agent, structured, asynchronous)
