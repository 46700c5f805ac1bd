"""OpenAI's agents, by way of chat completions and of responses."""

from __future__ import annotations

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from common import CALL, FORECAST, KEY, MODEL, PERSON, QUESTION, TEXT, URL, equal, run, say
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)


class Person(BaseModel):
    name: str
    born: int


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return say(FORECAST + city)


CLIENT = AsyncOpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0)
MODELS = [
    kind(model=MODEL, openai_client=CLIENT)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel)
]


async def tools() -> None:
    for model in MODELS:
        agent = Agent("weather", instructions="Be brief.", model=model, tools=[get_weather])
        found = await Runner.run(agent, CALL)
        equal(found.final_output, FORECAST + "Paris")


async def stream() -> None:
    for model in MODELS:
        found = Runner.run_streamed(Agent("weather", model=model, tools=[get_weather]), CALL)
        text = ""
        async for event in found.stream_events():
            data = getattr(event, "data", None)
            if getattr(data, "type", "") == "response.output_text.delta":
                text += data.delta
        equal((text, found.final_output), (FORECAST + "Paris",) * 2)


async def structured() -> None:
    for model in MODELS:
        found = await Runner.run(Agent("who", model=model, output_type=Person), say(PERSON))
        equal(found.final_output, Person(name="Ada", born=1815))


async def two_turns() -> None:
    for model in MODELS:
        session = SQLiteSession("two turns")
        agent = Agent("echo", model=model)
        equal((await Runner.run(agent, QUESTION, session=session)).final_output, TEXT)
        equal((await Runner.run(agent, "And now?", session=session)).final_output, TEXT)
        equal(len(await session.get_items()), 4)


run(tools, stream, structured, two_turns)
