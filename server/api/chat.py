"""/v1/chat/completions, and the chat request that other conversations amount to."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from runtime.errors import InvalidRequest
from server.api.answers import ChatAnswer
from server.api.body_fields import BodyFields
from server.api.delivery import send
from server.api.sampling_fields import check_model, generation_params
from server.formats.answer_parser import MessageParser, PlainContent
from server.formats.chat_messages import parse_messages
from server.formats.tools import parse_tools
from server.service import REQUEST_ID, SERVICE, new_id, read_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from server.generation.params import ApiLimits, GenerationParams
    from server.service import Service
    from server.text.chat_template import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """/v1/chat/completions. render: options of `ChatTemplate.render`."""

    messages: list[Message]
    render: dict[str, Any]
    params: GenerationParams


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A chat request, ready to be generated.

    Args: new_parser: makes the parser of one choice's text.
    """

    prompt_ids: list[int]
    params: GenerationParams
    new_parser: Callable[[], MessageParser] = PlainContent


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


async def plan_chat(body: Any, service: Service) -> ChatPlan:
    """Reads a chat request and renders its prompt.

    Raises: InvalidRequest, ModelNotFound.
    """
    wish = parse_chat(body, service.limits)
    tools = parse_tools(body)
    model_format = service.model_format
    messages, more = model_format.conversation(wish.messages, tools)
    prompt_ids = await service.tokenizer.encode_chat(messages, **wish.render, **more)
    begun = wish.messages[-1]["content"] if wish.render["continue_final_message"] else ""
    params = await model_format.constrained(
        wish.params, body, tools=tools, prompt_ids=prompt_ids, begun=begun
    )
    return ChatPlan(prompt_ids, params, model_format.parser_factory(prompt_ids, tools, begun))


def parse_chat(body: Any, limits: ApiLimits) -> ChatRequest:
    """Raises: InvalidRequest: a field that is wrong. ModelNotFound."""
    fields = BodyFields(body)
    check_model(fields, limits)
    messages = parse_messages(fields.get("messages"))
    max_tokens = fields.integer("max_completion_tokens", low=1)
    if max_tokens is None:
        max_tokens = fields.integer("max_tokens", low=1, default=limits.defaults.max_new_tokens)
    top = fields.integer("top_logprobs", low=0, high=limits.max_logprobs)
    wanted = fields.boolean("logprobs")
    if top is not None and not wanted:
        raise InvalidRequest("top_logprobs: needs logprobs to be true", param="top_logprobs")
    n = fields.integer("n", low=1, high=limits.max_n, default=1) or 1
    params = generation_params(
        fields, limits, max_tokens=max_tokens, logprobs=(top or 0) if wanted else None, n=n
    )
    return ChatRequest(messages=messages, render=render_options(fields, messages), params=params)


def render_options(fields: BodyFields, messages: list[Message]) -> dict[str, Any]:
    """How a chat template is to render the conversation.

    Raises: InvalidRequest: both a generation prompt and continuing the last message are wanted.
    """
    continued = fields.boolean("continue_final_message")
    if continued and fields.get("add_generation_prompt") is True:
        raise InvalidRequest(
            "continue_final_message: cannot be true together with add_generation_prompt",
            param="continue_final_message",
        )
    if continued and messages[-1]["role"] != "assistant":
        raise InvalidRequest(
            "continue_final_message: the last message must be the assistant's, it is the"
            f" {messages[-1]['role']}'s",
            param="continue_final_message",
        )
    kwargs = fields.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise fields.error("chat_template_kwargs", "an object")
    return {
        "add_generation_prompt": fields.boolean("add_generation_prompt", not continued),
        "continue_final_message": continued,
        "kwargs": kwargs,
    }


ROUTES = [web.post("/v1/chat/completions", chat_completions)]
