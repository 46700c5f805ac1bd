"""Instructor: structured output by tools, by JSON and by schema, over both official clients."""

from __future__ import annotations

import anthropic
import instructor
import openai
from common import KEY, MODEL, PERSON, URL, call, equal, run, say
from pydantic import BaseModel, field_validator

ADA = {"name": "Ada", "born": 1815}


class Person(BaseModel):
    name: str
    born: int


class Later(BaseModel):
    """A person whom only the second answer fits."""

    name: str
    born: int

    @field_validator("born")
    @classmethod
    def late(cls, born: int) -> int:
        assert born > 1800, say(PERSON)  # told to the model, which then says this
        return born


def of_openai(mode: instructor.Mode) -> instructor.Instructor:
    client = openai.OpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0)
    return instructor.from_openai(client, mode=mode)


def create(client: instructor.Instructor, text: str, model: type = Person, **more) -> dict:
    messages = [{"role": "user", "content": text}]
    found = client.create(response_model=model, messages=messages, model=MODEL, **more)
    return found.model_dump()


def structured() -> None:
    by_text = (instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA, instructor.Mode.MD_JSON)
    for mode in by_text:
        equal(create(of_openai(mode), say(PERSON)), ADA)


def tools() -> None:
    equal(create(of_openai(instructor.Mode.TOOLS), call("Person", PERSON)), ADA)
    client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
    own = instructor.from_anthropic(client, mode=instructor.Mode.ANTHROPIC_TOOLS)
    equal(create(own, call("Person", PERSON), max_tokens=200), ADA)


def stream() -> None:
    client = of_openai(instructor.Mode.JSON)
    messages = [{"role": "user", "content": say(PERSON)}]
    found = list(client.create_partial(response_model=Person, messages=messages, model=MODEL))
    equal(found[-1].model_dump(), ADA)
    assert len(found) > 2, "it came in pieces"


def second_attempt() -> None:
    early = say('{"name": "Ada", "born": 1700}')
    found = create(of_openai(instructor.Mode.JSON), early, Later, max_retries=2)
    equal(found, ADA)


async def asynchronous() -> None:
    client = openai.AsyncOpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0)
    own = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    messages = [{"role": "user", "content": say(PERSON)}]
    found = await own.create(response_model=Person, messages=messages, model=MODEL)
    equal(found.model_dump(), ADA)


run(structured, tools, stream, second_attempt, asynchronous)
