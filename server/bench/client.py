"""Asks once and reads the stream."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

import aiohttp
import orjson

from runtime.errors import ConfigError
from server.bench.answer import Answer
from server.bench.target import StreamError, take_event

if TYPE_CHECKING:
    from collections.abc import Callable

    from server.bench.target import Prompt, Target

SHOWN_CHARACTERS = 200  # of an error


def open_session(target: Target) -> aiohttp.ClientSession:
    """A session without a limit on connections; close it with `async with`."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=not target.keep_alive),
        timeout=aiohttp.ClientTimeout(total=target.timeout_s, sock_connect=30),
        headers=target.headers,
    )


async def first_model(session: aiohttp.ClientSession, target: Target) -> str:
    """The id of the first model the server lists.

    Raises: ConfigError: there is no such server, or it lists none.
    """
    url = target.url("/v1/models")
    try:
        async with session.get(url) as response:
            status, text = response.status, await response.text()
    except aiohttp.ClientConnectorError as error:
        why = os.strerror(error.errno) if error.errno else error.strerror
        raise ConfigError(f"{target.base_url}: no server answers ({why})") from None
    if status != 200:
        hint = "; see --api-key" if status in (401, 403) else ""
        raise ConfigError(f"{url}: {status}: {_error_told(text)}{hint}")
    try:
        return str(orjson.loads(text)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise ConfigError(f"{url}: lists no model") from None


def _error_told(text: str) -> str:
    """What the body of an error says, in a few words."""
    try:
        told = orjson.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        told = text
    return " ".join(str(told).split())[:SHOWN_CHARACTERS]


async def ask(
    session: aiohttp.ClientSession,
    target: Target,
    prompt: Prompt,
    max_tokens: int,
    *,
    tag: str = "",
    on_token: Callable[[Answer], None] | None = None,
) -> Answer:
    """One streamed request; whatever goes wrong is told by `error`, nothing is raised."""
    answer = Answer(max_tokens, tag)
    await fill(session, target, prompt, answer, on_token)
    return answer


async def fill(
    session: aiohttp.ClientSession,
    target: Target,
    prompt: Prompt,
    answer: Answer,
    on_token: Callable[[Answer], None] | None = None,
) -> None:
    """Asks for `answer.wanted_tokens` and notes what comes, or what went wrong.

    Raises: CancelledError: the answer is marked as cut.
    """
    body = target.body(prompt, answer.wanted_tokens)
    answer.start = time.perf_counter()
    try:
        async with session.post(target.ask_url, json=body) as response:
            if response.status == 200:
                await _read_events(response, answer, on_token)
            else:
                answer.error = f"HTTP {response.status}: {await response.text()}"
    except asyncio.CancelledError:
        answer.cut = True
        raise
    except TimeoutError:
        answer.error = "timeout"
    except StreamError as error:
        answer.error = f"error in the stream: {error}"
    except (aiohttp.ClientError, ConnectionError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        answer.end = time.perf_counter()
        _close(answer)


def _close(answer: Answer) -> None:
    if answer.ok and not answer.times:
        answer.error = "no token: the stream ended without one"
    if answer.error is not None:
        answer.error = " ".join(answer.error.split())[:SHOWN_CHARACTERS]
    elif not answer.completion_tokens:
        answer.usage_missing = not answer.cut
        answer.completion_tokens = len(answer.times)


async def _read_events(
    response: aiohttp.ClientResponse, answer: Answer, on_token: Callable[[Answer], None] | None
) -> None:
    rest = b""
    async for data in response.content.iter_any():
        now = time.perf_counter()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                return
            if _take(payload, answer):
                answer.times.append(now)
                if on_token:
                    on_token(answer)


def _take(payload: bytes, answer: Answer) -> bool:
    try:
        return take_event(orjson.loads(payload), answer)
    except StreamError:
        raise
    except (ValueError, AttributeError, TypeError) as error:
        raise StreamError(f"an event that cannot be read ({error}): {payload[:80]!r}") from None
