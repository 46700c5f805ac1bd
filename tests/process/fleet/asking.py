"""Clients of a fleet: many streamed completions at once, and what became of each."""

from __future__ import annotations

import asyncio
import json
import random
import string
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import aiohttp

MODEL = "tiny-llama"
PATIENCE_S = 120.0  # far beyond what an answer takes: a hang must fail, not stall


@dataclass(slots=True)
class Answer:
    """What a client has got.

    Args:
        status: 0: no answer began.
        complete: the stream ended as one should.
        ended_s: on the clock of `time.monotonic`.
        heard: called when more has come.
    """

    status: int = 0
    text: str = ""
    complete: bool = False
    ended_s: float = 0.0
    error: str = ""
    heard: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and the tokens of its answer."""

    prompt: str
    max_tokens: int = 24

    @property
    def body(self) -> dict:
        return {
            "model": MODEL, "prompt": self.prompt, "stream": True, "temperature": 0,
            "max_tokens": self.max_tokens, "ignore_eos": True,
        }  # fmt: skip


def prefix(number: int, tokens: int) -> str:
    """One of the prefixes that prompts share; no two begin alike for long. A letter is a token."""
    return "".join(random.Random(number).choices(string.ascii_letters, k=tokens))


def shared_prompts(prefixes: int, times: int, tokens: int = 192, seed: int = 0) -> list[str]:
    """Prompts in random order, in which each prefix comes so many times."""
    prompts = [
        f"{prefix(number, tokens)} and {turn}"
        for number in range(prefixes)
        for turn in range(times)
    ]
    random.Random(seed).shuffle(prompts)
    return prompts


async def ask(
    client: aiohttp.ClientSession, url: str, question: Question, got: Answer | None = None
) -> Answer:
    """Asks, and takes what comes until the end, whichever it is.

    Args: got: what has come so far, for somebody who looks on.
    """
    got = got or Answer()
    try:
        async with client.post(url + "/v1/completions", json=question.body) as answer:
            got.status = answer.status
            if answer.status != 200:
                got.error = (await answer.text())[:200]
            async for line in answer.content:
                _take(got, line)
                got.heard()
    except aiohttp.ClientError as error:
        got.error = f"{type(error).__name__}: {error}"
    got.ended_s = time.monotonic()
    return got


def _take(got: Answer, line: bytes) -> None:
    if line.startswith(b"data: {"):
        event = json.loads(line[6:])
        if "error" in event:
            got.error = str(event["error"])
        elif event["choices"]:
            got.text += event["choices"][0]["text"]
    elif line.startswith(b"data: [DONE]"):
        got.complete = not got.error


def client_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=PATIENCE_S), connector=aiohttp.TCPConnector(limit=0)
    )


async def ask_each(url: str, questions: Iterable[Question], at_once: int) -> list[Answer]:
    """All of them, so many at a time, in their order."""
    gate = asyncio.Semaphore(at_once)

    async def one(question: Question) -> Answer:
        async with gate:
            return await ask(client, url, question)

    async with client_session() as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(question)) for question in questions]
    return [task.result() for task in tasks]


def ask_all(url: str, questions: Iterable[Question], at_once: int = 8) -> list[Answer]:
    return asyncio.run(ask_each(url, questions, at_once))
