"""Pydantic AI, by way of chat completions and of responses (its way to Anthropic's messages does
not work with the current client of theirs)."""

from __future__ import annotations

from common import CALL, FORECAST, KEY, MODEL, PERSON, QUESTION, TEXT, URL, call, equal, run, say
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    name: str
    born: int


PROVIDER = OpenAIProvider(base_url=URL + "/v1", api_key=KEY)
MODELS = [kind(MODEL, provider=PROVIDER) for kind in (OpenAIChatModel, OpenAIResponsesModel)]


def get_weather(city: str) -> str:
    """The weather of a city."""
    return say(FORECAST + city)


async def tools() -> None:
    for model in MODELS:
        agent = Agent(model, instructions="Be brief.", tools=[get_weather])
        equal((await agent.run(CALL)).output, FORECAST + "Paris")


async def stream() -> None:
    for model in MODELS:
        async with Agent(model).run_stream(QUESTION) as found:
            pieces = [piece async for piece in found.stream_text(delta=True, debounce_by=None)]
        equal("".join(pieces), TEXT)


async def structured() -> None:
    asked = call("final_result", PERSON)
    for model in MODELS:
        found = await Agent(model, output_type=Person).run(asked)
        equal(found.output, Person(name="Ada", born=1815))
        found = await Agent(model, output_type=NativeOutput(Person)).run(say(PERSON))
        equal(found.output, Person(name="Ada", born=1815))


async def two_turns() -> None:
    for model in MODELS:
        agent = Agent(model)
        first = await agent.run(QUESTION)
        second = await agent.run("And now?", message_history=first.new_messages())
        equal((second.output, len(second.all_messages())), (TEXT, 4))
        equal(second.usage.requests, 1)


run(tools, stream, structured, two_turns)
