"""The official client of Anthropic."""

from __future__ import annotations

import anthropic
from common import (
    CALL,
    FORECAST,
    KEY,
    MODEL,
    PARAMETERS,
    PERSON,
    QUESTION,
    TEXT,
    URL,
    equal,
    run,
    say,
)
from pydantic import BaseModel

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
TOOL = {"name": "get_weather", "input_schema": PARAMETERS}
COMMON = {"model": MODEL, "max_tokens": 200}


class Person(BaseModel):
    name: str
    born: int


def asked(text: str) -> list:
    return [{"role": "user", "content": text}]


def stream() -> None:
    with client.messages.stream(messages=asked(QUESTION), **COMMON) as events:
        equal("".join(events.text_stream), TEXT)
        equal(events.get_final_message().stop_reason, "end_turn")


def thinking() -> None:
    answer = client.messages.create(
        messages=asked(say("<think>Hm.</think>Yes.")), thinking={"type": "adaptive"}, **COMMON
    )
    equal([block.type for block in answer.content], ["thinking", "text"])
    equal((answer.content[0].thinking, answer.content[1].text), ("Hm.", "Yes."))
    again = [*asked("x"), {"role": "assistant", "content": answer.content}, *asked(QUESTION)]
    equal(client.messages.create(messages=again, **COMMON).content[0].text, TEXT)


def tools() -> None:
    messages = asked(CALL)
    with client.messages.stream(messages=messages, tools=[TOOL], **COMMON) as events:
        answer = events.get_final_message()
    (use,) = answer.content
    equal((answer.stop_reason, use.name, use.input), ("tool_use", "get_weather", {"city": "Paris"}))
    result = {"type": "tool_result", "tool_use_id": use.id, "content": say(FORECAST)}
    messages += [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(messages=messages, tools=[TOOL], **COMMON)
    equal((answer.content[0].text, answer.stop_reason), (FORECAST, "end_turn"))


def tool_runner() -> None:
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return say(FORECAST + city)

    # By default each turn names the one before it, which this server does not keep.
    runner = client.beta.messages.tool_runner(
        messages=asked(CALL), tools=[get_weather], thread=False, **COMMON
    )
    equal(runner.until_done().content[0].text, FORECAST + "Paris")


def structured() -> None:
    answer = client.messages.parse(messages=asked(say(PERSON)), output_format=Person, **COMMON)
    equal(answer.parsed_output, Person(name="Ada", born=1815))


async def asynchronous() -> None:
    async with anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0) as own:
        answer = await own.messages.create(
            messages=asked(QUESTION), stop_sequences=[" in"], **COMMON
        )
        counted = await own.messages.count_tokens(model=MODEL, messages=asked(QUESTION))
    equal((answer.stop_reason, answer.stop_sequence), ("stop_sequence", " in"))
    equal(answer.content[0].text, TEXT.partition(" in")[0])
    equal(answer.usage.input_tokens + answer.usage.cache_read_input_tokens, counted.input_tokens)


run(stream, thinking, tools, tool_runner, structured, asynchronous)
