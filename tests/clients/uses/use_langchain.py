"""LangChain's OpenAI models."""

from __future__ import annotations

from common import CALL, FORECAST, KEY, MODEL, PERSON, QUESTION, TEXT, URL, call, equal, run, say
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

COMMON = {"model": MODEL, "base_url": URL + "/v1", "api_key": KEY, "max_retries": 0}
chat = ChatOpenAI(**COMMON)
by_responses = ChatOpenAI(**COMMON, use_responses_api=True)


class Person(BaseModel):
    """A person."""

    name: str
    born: int


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return say(FORECAST + city)


def stream() -> None:
    for model in (chat, by_responses):
        total = None
        for chunk in model.stream(QUESTION):
            total = chunk if total is None else total + chunk
        equal(total.text, TEXT)
    equal("".join(OpenAI(**COMMON, max_tokens=99).stream(QUESTION)), TEXT)


def tools_in_two_turns() -> None:
    for model in (chat, by_responses):
        bound = model.bind_tools([get_weather])
        messages = [SystemMessage("Be brief."), HumanMessage(CALL)]
        answer = bound.invoke(messages)
        (made,) = answer.tool_calls
        equal((made["name"], made["args"]), ("get_weather", {"city": "Paris"}))
        result = ToolMessage(get_weather.invoke(made["args"]), tool_call_id=made["id"])
        equal(bound.invoke([*messages, answer, result]).text, FORECAST + "Paris")


def structured() -> None:
    wanted = Person(name="Ada", born=1815)
    for method in ("json_schema", "json_mode"):
        found = chat.with_structured_output(Person, method=method).invoke(say(PERSON))
        equal(found, wanted)
    by_call = chat.with_structured_output(Person, method="function_calling")
    equal(by_call.invoke(call("Person", PERSON)), wanted)
    equal(by_responses.with_structured_output(Person).invoke(say(PERSON)), wanted)


async def asynchronous() -> None:
    answer = await chat.ainvoke(QUESTION)
    equal((answer.text, answer.response_metadata["finish_reason"]), (TEXT, "stop"))
    equal(answer.usage_metadata["output_tokens"], len(TEXT.encode()) + 1)
    answers = await chat.abatch([QUESTION, say("two")])
    equal([one.text for one in answers], [TEXT, "two"])


run(stream, tools_in_two_turns, structured, asynchronous)
