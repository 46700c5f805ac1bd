"""/v1/completions and /v1/chat/completions, streamed and whole: thin forms of the core."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from server.api.answers import ChatAnswer, CompletionAnswer
from server.api.chat_plan import plan_chat
from server.api.openai_protocol import parse_completion
from server.http.errors import error_answer, internal_error
from server.http.sse import EventStream, SlowReader
from server.service import REQUEST_ID, SERVICE, json_response, new_id, read_json

if TYPE_CHECKING:
    from typing import Any

    from aiohttp import web

    from server.api.openai_protocol import CompletionRequest
    from server.generation.generator import Generation, Generator
    from server.generation.streams import Delta
    from server.http.errors import ErrorAnswer


class Answer(Protocol):
    """What turns a generation's deltas into an endpoint's bytes."""

    def events(self, delta: Delta) -> bytes: ...

    def closing(self) -> bytes: ...

    def failure(self, error: ErrorAnswer) -> bytes: ...

    async def whole(self) -> dict[str, Any]: ...


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    service = request.app[SERVICE]
    body = await read_json(request)
    wish = parse_completion(body, service.limits)
    params = await service.model_format.constrained(wish.params, body)
    prompts = await encode_prompts(wish, service.generator)
    request_id = new_id("cmpl")
    texts = [""] * len(prompts)
    if wish.params.echo:
        texts = [
            given if isinstance(given, str) else service.tokenizer.decode(given)
            for given in wish.prompts
        ]
    with service.generator.start(prompts, params, request_id, request[REQUEST_ID]) as generation:
        answer = CompletionAnswer(
            request_id,
            int(time.time()),
            service.limits.model,
            generation,
            service.tokenizer,
            texts,
        )
        return await send(request, generation, answer)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    service = request.app[SERVICE]
    plan = await plan_chat(await read_json(request), service)
    request_id = new_id("chatcmpl")
    with service.generator.start(
        [plan.prompt_ids], plan.params, request_id, request[REQUEST_ID]
    ) as generation:
        answer = ChatAnswer(
            request_id,
            int(time.time()),
            service.limits.model,
            generation,
            service.tokenizer,
            plan.new_parser,
        )
        return await send(request, generation, answer)


async def encode_prompts(wish: CompletionRequest, generator: Generator) -> list[list[int]]:
    """The token ids of every prompt; an empty text becomes the model's BOS where it has one."""
    found = []
    for prompt in wish.prompts:
        ids = prompt
        if isinstance(ids, str):
            ids = await generator.encode(ids, add_special_tokens=wish.add_special_tokens)
            if not ids and generator.tokenizer.bos_token_id is not None:
                ids = [generator.tokenizer.bos_token_id]
        found.append(ids)
    return found


async def send(request: web.Request, generation: Generation, answer: Answer) -> web.StreamResponse:
    """Answers with a body, or with events as they come."""
    if not generation.params.stream:
        return json_response(await answer.whole())
    out = EventStream(request, request.app[SERVICE].config.slow_reader_timeout)
    try:
        async for delta in generation:
            await out.send(answer.events(delta))
        await out.send(answer.closing())
    except (ConnectionError, SlowReader):
        return out.response  # nobody is there to be told; leaving aborts what still runs
    except Exception as error:
        if not out.started:
            raise
        # Clients must not take the stream for complete.
        await out.send(answer.failure(_known_error(request, error)))
    return await out.end()


def _known_error(request: web.Request, error: Exception) -> ErrorAnswer:
    found = error_answer(error)
    if found is None:
        request.app.logger.error("a stream failed", exc_info=error)
        found = internal_error()
    return found
