"""From a chat request to what is generated for it and how the text is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from server.api.openai_protocol import parse_chat
from server.formats.answer_parser import MessageParser, PlainContent
from server.formats.tools import parse_tools

if TYPE_CHECKING:
    from collections.abc import Callable

    from server.generation.params import GenerationParams
    from server.service import Service


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A chat request, ready to be generated.

    Args: new_parser: makes the parser of one choice's text.
    """

    prompt_ids: list[int]
    params: GenerationParams
    new_parser: Callable[[], MessageParser] = PlainContent


async def plan_chat(body: Any, service: Service) -> ChatPlan:
    """Reads a chat request and renders its prompt.

    Raises: InvalidRequest, ModelNotFound.
    """
    wish = parse_chat(body, service.limits)
    tools = parse_tools(body)
    model_format = service.model_format
    messages, more = model_format.conversation(wish.messages, tools)
    prompt_ids = await service.tokenizer.encode_chat(messages, **wish.render, **more)
    params = await model_format.constrained(wish.params, body, tools=tools, prompt_ids=prompt_ids)
    return ChatPlan(prompt_ids, params, model_format.parser_factory(prompt_ids, tools))
