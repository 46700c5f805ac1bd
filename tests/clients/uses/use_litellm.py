"""LiteLLM, as OpenAI's and as Anthropic's client."""

from __future__ import annotations

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no look into the network

import litellm
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

litellm.telemetry = False
OPENAI = {"model": f"openai/{MODEL}", "api_base": URL + "/v1", "api_key": KEY, "max_retries": 0}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": KEY, "max_tokens": 200}
HOSTED = {"model": f"hosted_vllm/{MODEL}", "api_base": URL + "/v1", "api_key": KEY}
ALL = (OPENAI, ANTHROPIC, HOSTED)
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}


class Person(BaseModel):
    name: str
    born: int


def asked(text: str) -> list:
    return [{"role": "user", "content": text}]


def stream() -> None:
    for options in ALL:
        chunks = list(litellm.completion(messages=asked(QUESTION), stream=True, **options))
        equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks), TEXT)
        equal([c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason], ["stop"])


def tools_in_two_turns() -> None:
    for options in ALL:
        messages = asked(CALL)
        answer = litellm.completion(messages=messages, tools=[TOOL], **options)
        message = answer.choices[0].message
        (made,) = message.tool_calls
        equal((made.function.name, json.loads(made.function.arguments)),
              ("get_weather", {"city": "Paris"}))  # fmt: skip
        result = {"role": "tool", "tool_call_id": made.id, "content": say(FORECAST)}
        answer = litellm.completion(messages=[*messages, message, result], tools=[TOOL], **options)
        equal(answer.choices[0].message.content, FORECAST)


def structured() -> None:
    for options in (OPENAI, HOSTED):
        answer = litellm.completion(messages=asked(say(PERSON)), response_format=Person, **options)
        equal(Person.model_validate_json(answer.choices[0].message.content).born, 1815)


async def asynchronous() -> None:
    for options in ALL:
        answer = await litellm.acompletion(messages=asked(QUESTION), **options)
        equal(answer.choices[0].message.content, TEXT)
        equal(answer.usage.completion_tokens, len(TEXT.encode()) + 1)
    found = await litellm.aresponses(input=QUESTION, **OPENAI)
    equal(found.output[0].content[0].text, TEXT)


run(stream, tools_in_two_turns, structured, asynchronous)
