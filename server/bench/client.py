"""Asks once and reads the stream."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

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

    Raises: aiohttp.ClientError: there is no such server, or it lists none.
    """
    async with session.get(target.url("/v1/models")) as response:
        response.raise_for_status()
        listed: Any = await response.json(content_type=None)
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise aiohttp.ClientPayloadError(f"{target.url('/v1/models')}: lists no model") from None


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
