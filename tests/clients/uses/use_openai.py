"""The official client of OpenAI: chat, completions and responses."""

from __future__ import annotations

import json

import openai
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

client = openai.OpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0)
FUNCTION = {"name": "get_weather", "parameters": PARAMETERS}


class Person(BaseModel):
    name: str
    born: int


def stream() -> None:
    messages = [{"role": "user", "content": QUESTION}]
    with client.chat.completions.stream(model=MODEL, messages=messages) as events:
        deltas = [event.delta for event in events if event.type == "content.delta"]
        final = events.get_final_completion()
    equal("".join(deltas), TEXT)
    equal(final.choices[0].message.content, TEXT)
    chunks = client.completions.create(model=MODEL, prompt=QUESTION, max_tokens=99, stream=True)
    equal("".join(chunk.choices[0].text for chunk in chunks), TEXT)


def tools() -> None:
    messages: list = [{"role": "user", "content": CALL}]
    offered = [{"type": "function", "function": FUNCTION}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=offered)
    message = answer.choices[0].message
    equal(answer.choices[0].finish_reason, "tool_calls")
    equal(json.loads(message.tool_calls[0].function.arguments), {"city": "Paris"})
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": say(FORECAST)}
    answer = client.chat.completions.create(
        model=MODEL, messages=[*messages, message, result], tools=offered
    )
    equal(answer.choices[0].message.content, FORECAST)


def structured() -> None:
    messages = [{"role": "user", "content": say(PERSON)}]
    parsed = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Person)
    equal(parsed.choices[0].message.parsed, Person(name="Ada", born=1815))
    response = client.responses.parse(model=MODEL, input=say(PERSON), text_format=Person)
    equal(response.output_parsed, Person(name="Ada", born=1815))


def responses_in_two_turns() -> None:
    tool = {"type": "function", "strict": False, **FUNCTION}
    items: list = [{"role": "user", "content": CALL}]
    first = client.responses.create(model=MODEL, input=items, tools=[tool])
    (made,) = [item for item in first.output if item.type == "function_call"]
    equal((made.name, json.loads(made.arguments)), ("get_weather", {"city": "Paris"}))
    items += first.output
    items.append({"type": "function_call_output", "call_id": made.call_id, "output": say(FORECAST)})
    equal(client.responses.create(model=MODEL, input=items, tools=[tool]).output_text, FORECAST)
    with client.responses.stream(model=MODEL, input=QUESTION) as events:
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        equal(events.get_final_response().output_text, text)
    equal(text, TEXT)


async def asynchronous() -> None:
    async with openai.AsyncOpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0) as own:
        answer = await own.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": QUESTION}], max_tokens=5
        )
    equal(answer.choices[0].message.content, TEXT[:5])
    equal((answer.choices[0].finish_reason, answer.usage.completion_tokens), ("length", 5))


def errors() -> None:
    try:
        client.responses.create(model="other", input="x")
    except openai.NotFoundError as error:
        equal(error.code, "model_not_found")
    else:
        raise AssertionError("an unknown model was served")


run(stream, tools, structured, responses_in_two_turns, asynchronous, errors)
