"""A scripted OpenAI-compatible server for the tests beside this."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.test_utils import TestServer


class FakeServer:
    """Streams `max_tokens` words with usage; `behaviour` may replace the answer of a request."""

    def __init__(self, behaviour: Callable | None = None) -> None:
        self.bodies: list[dict] = []
        self.running = 0
        self.most_running = 0
        self._behaviour = behaviour

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if self._behaviour:
                return await self._behaviour(request, body)
            return await self._stream(request, body)
        finally:
            self.running -= 1

    async def _stream(self, request: web.Request, body: dict) -> web.StreamResponse:
        chat = request.path.endswith("chat/completions")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count = body["max_tokens"]
        for index in range(count):
            text = {"delta": {"content": "a"}} if chat else {"text": "a"}
            reason = "length" if index == count - 1 else None
            await send(response, {"choices": [{**text, "finish_reason": reason}]})
            await asyncio.sleep(0)
        usage = {"prompt_tokens": 7, "completion_tokens": count}
        usage["prompt_tokens_details"] = {"cached_tokens": 3}
        await send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


async def send(response: web.StreamResponse, event: dict) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@asynccontextmanager
async def serving(fake: FakeServer) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/v1/models", fake.models)
    app.router.add_post("/v1/completions", fake.complete)
    app.router.add_post("/v1/chat/completions", fake.complete)
    async with TestServer(app) as server:
        yield str(server.make_url("/"))
