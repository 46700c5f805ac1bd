"""/v1/responses and /v1/messages: other forms of the chat endpoint."""

from __future__ import annotations

import time

from aiohttp import web

from server.api import messages as anthropic_api
from server.api import responses as responses_api
from server.api.chat_plan import plan_chat
from server.api.completions import send
from server.service import REQUEST_ID, SERVICE, json_response, new_id, read_json


async def responses(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses."""
    service = request.app[SERVICE]
    body = await read_json(request)
    plan = await plan_chat(responses_api.chat_body(body), service)
    response_id = new_id("resp")
    with service.generator.start(
        [plan.prompt_ids], plan.params, response_id, request[REQUEST_ID]
    ) as generation:
        answer = responses_api.ResponseAnswer(
            response_id,
            body,
            int(time.time()),
            service.limits.model,
            generation,
            plan.new_parser,
        )
        return await send(request, generation, answer)


async def messages(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages."""
    service = request.app[SERVICE]
    plan = await plan_chat(anthropic_api.chat_body(await read_json(request)), service)
    message_id = new_id("msg")
    with service.generator.start(
        [plan.prompt_ids], plan.params, message_id, request[REQUEST_ID]
    ) as generation:
        answer = anthropic_api.AnthropicAnswer(
            message_id, service.limits.model, generation, plan.new_parser
        )
        return await send(request, generation, answer)


async def count_tokens(request: web.Request) -> web.Response:
    """POST /v1/messages/count_tokens: the tokens of the prompt that /v1/messages would make."""
    body = anthropic_api.chat_body(await read_json(request), counting=True)
    plan = await plan_chat(body, request.app[SERVICE])
    return json_response({"input_tokens": len(plan.prompt_ids)})


CHAT_ROUTES = [
    web.post("/v1/responses", responses),
    web.post("/v1/messages", messages),
    web.post("/v1/messages/count_tokens", count_tokens),
]
