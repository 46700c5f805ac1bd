"""Measures one streamed answer of an OpenAI-compatible server, and sums many up.

Shared by load_test.py and bench_cpu.py. Needs aiohttp only. All times are of this process's
monotonic clock, so HTTP and SSE parsing are included:

- TTFT: request written -> first chunk that stands for a token.
- ITL: gap between two such chunks of one answer. A server that puts several tokens into one
  chunk shows fewer, longer gaps.
- TPOT: (last token chunk - first token chunk) / (completion tokens - 1).
- E2E: request written -> end of the stream.

Token counts come from the server's `usage`; without one, chunks are counted.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

# Common words, each one token (with its leading space) in GPT-2's family of tokenizers.
_TEXT = """time year people way day man thing woman life child world school state family student
group country problem hand part place case week company system program question work government
number night point home water room mother area money story fact month lot right study book eye
job word business issue side kind head house service friend father power hour game line end
member law car city community name president team minute idea body information back parent face
level office door health person art war history party result change morning reason research girl
moment air teacher force education good new first last long great little own other old big high
small large next early young important few public bad same able go see come think look want give
use find tell ask work seem feel try leave call keep let begin help show hear play run move live
believe bring happen write provide sit stand lose pay meet include continue set learn lead watch
follow stop create speak read allow add spend grow open walk win offer remember love consider
river stone winter summer music paper table window garden forest ocean mountain bridge road
"""
WORDS = tuple(_TEXT.split())


def random_words(rng: random.Random, count: int) -> str:
    """About `count` tokens of text."""
    return " ".join(rng.choices(WORDS, k=count))


@dataclass(slots=True)
class Answer:
    """One request and what came back.

    Args:
        times: arrival of each chunk that stands for a token.
        error: why it failed; None for a complete answer.
        usage_missing: the server gave no usage, so completion_tokens counts chunks.
    """

    tag: str
    wanted_tokens: int
    start: float = 0.0
    end: float = 0.0
    times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    completion_tokens: int = 0
    usage_missing: bool = False
    finish_reason: str | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft(self) -> float:
        return self.times[0] - self.start

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        if self.completion_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class Target:
    """The server and how it is asked.

    Args:
        base_url: with or without a closing /v1.
        endpoint: "completions" or "chat".
        extra: merged into each request body.
        keep_alive: reuse connections. Off by default: some servers close one after each stream,
            and the next request on it would fail.
    """

    base_url: str
    model: str
    endpoint: str = "completions"
    extra: dict[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    timeout_s: float = 600.0
    keep_alive: bool = False

    def url(self, path: str) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1") + path

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "stream": True, "max_tokens": max_tokens}
        body["stream_options"] = {"include_usage": True}
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        return body | self.extra


def open_session(target: Target) -> aiohttp.ClientSession:
    """A session without a limit on connections; close it with `async with`."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=not target.keep_alive),
        timeout=aiohttp.ClientTimeout(total=target.timeout_s, sock_connect=30),
        headers=target.headers,
    )


async def first_model(session: aiohttp.ClientSession, target: Target) -> str:
    """The id of the first model the server lists."""
    async with session.get(target.url("/v1/models")) as response:
        response.raise_for_status()
        return str((await response.json())["data"][0]["id"])


async def ask(
    session: aiohttp.ClientSession,
    target: Target,
    prompt: str,
    max_tokens: int,
    *,
    tag: str = "",
    on_token: Callable[[Answer], None] | None = None,
) -> Answer:
    """One streamed request; whatever goes wrong is told by `error`, nothing is raised."""
    answer = Answer(tag, max_tokens, start=time.perf_counter())
    path = "/v1/chat/completions" if target.endpoint == "chat" else "/v1/completions"
    body = target.body(prompt, max_tokens)
    try:
        async with session.post(target.url(path), json=body) as response:
            if response.status == 200:
                await _read_events(response, answer, on_token)
            else:
                text = " ".join((await response.text()).split())
                answer.error = f"HTTP {response.status}: {text[:200]}"
    except TimeoutError:
        answer.error = "timeout"
    except (aiohttp.ClientError, ConnectionError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"[:200]
    answer.end = time.perf_counter()
    if answer.ok and not answer.times:
        answer.error = "the stream ended without a token"
    if answer.ok and not answer.completion_tokens:
        answer.usage_missing = True
        answer.completion_tokens = len(answer.times)
    return answer


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
            if _take_event(json.loads(payload), answer):
                answer.times.append(now)
                if on_token:
                    on_token(answer)


def _take_event(event: dict[str, Any], answer: Answer) -> bool:
    """Notes what an event says; true where it stands for a token."""
    if event.get("error"):
        raise ValueError(f"error in the stream: {json.dumps(event['error'])}")
    usage = event.get("usage")
    if usage:
        answer.prompt_tokens = usage.get("prompt_tokens") or 0
        answer.completion_tokens = usage.get("completion_tokens") or 0
        details = usage.get("prompt_tokens_details") or {}
        answer.cached_tokens = details.get("cached_tokens")
    is_token = False
    for choice in event.get("choices") or []:
        reason = choice.get("finish_reason")
        delta = choice.get("delta")
        if delta is None:  # an empty text before the end is a token that shows no text
            is_token |= bool(choice.get("text")) or not reason
        else:
            is_token |= bool(delta.get("content") or delta.get("reasoning_content"))
        answer.finish_reason = reason or answer.finish_reason
    return is_token


async def closed_loop(
    calls: Iterable[Callable[[], Awaitable[Answer]]], concurrency: int
) -> list[Answer]:
    """Runs the calls in order, `concurrency` at a time; answers in the order of their start."""
    remaining = iter(calls)

    async def worker() -> list[Answer]:
        return [await call() for call in remaining]

    shares = await asyncio.gather(*(worker() for _ in range(concurrency)))
    return sorted((answer for share in shares for answer in share), key=lambda a: a.start)


async def open_loop(
    calls: Iterable[Callable[[], Awaitable[Answer]]], rate: float, rng: random.Random
) -> list[Answer]:
    """Starts the calls at the times of a Poisson process of `rate` per second, whatever the
    server does: a slow server meets the same load as a fast one."""
    tasks: list[asyncio.Task[Answer]] = []
    due = time.perf_counter()
    for call in calls:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.ensure_future(call()))
        due += rng.expovariate(rate)
    return list(await asyncio.gather(*tasks))


def percentile(values: Sequence[float], percent: float) -> float | None:
    """By linear interpolation between the closest ranks (numpy's default); None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, p50, p90, p99 and max in milliseconds; None of nothing."""
    if not seconds:
        return None
    spread = {"mean": sum(seconds) / len(seconds), "max": max(seconds)}
    spread |= {f"p{p}": percentile(seconds, p) or 0.0 for p in (50, 90, 99)}
    return {name: round(value * 1e3, 3) for name, value in spread.items()}


def summarize(answers: Sequence[Answer], wall_s: float) -> dict[str, Any]:
    """Counts, rates and spreads of many answers, as JSON."""
    good = [answer for answer in answers if answer.ok]
    errors: dict[str, int] = {}
    for answer in answers:
        if answer.error:
            errors[answer.error] = errors.get(answer.error, 0) + 1
    prompt_tokens = sum(answer.prompt_tokens for answer in good)
    output_tokens = sum(answer.completion_tokens for answer in good)
    cached = [answer.cached_tokens for answer in good if answer.cached_tokens is not None]
    return {
        "requests": len(answers),
        "completed": len(good),
        "errors": errors,
        "wall_s": round(wall_s, 6),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(cached) if cached else None,
        "output_tokens": output_tokens,
        "short_answers": sum(a.completion_tokens < a.wanted_tokens for a in good),
        "usage_missing": sum(answer.usage_missing for answer in good),
        "requests_per_s": round(len(good) / wall_s, 3),
        "output_tokens_per_s": round(output_tokens / wall_s, 2),
        "total_tokens_per_s": round((prompt_tokens + output_tokens) / wall_s, 2),
        "ttft_ms": spread_ms([answer.ttft for answer in good]),
        "itl_ms": spread_ms([gap for answer in good for gap in answer.gaps]),
        "tpot_ms": spread_ms([answer.tpot for answer in good if answer.tpot is not None]),
        "e2e_ms": spread_ms([answer.end - answer.start for answer in good]),
    }
