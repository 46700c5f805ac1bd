"""/v1/chat/completions, and the chat that every conversation amounts to."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from aiohttp import web

from runtime.errors import InvalidRequest
from server.api.chat_answer import ChatAnswer
from server.api.chat_messages import MESSAGES, TOOL_CHOICE, TOOLS
from server.api.delivery import send
from server.api.fields import Body, ignored, refused, required, served
from server.api.incoming import read_body
from server.api.kinds import MAX_LOGPROBS, Boolean, Choice, Integer, JsonObject
from server.api.request_fields import OpenAIFields
from server.formats.answer_parser import AnswerParser
from server.formats.chat_messages import parse_messages
from server.formats.tools import parse_tools
from server.service import REQUEST_ID, SERVICE, new_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from server.formats.tools import ToolRequest
    from server.generation.params import ApiLimits, GenerationParams
    from server.grammars.output_rules import OutputRule
    from server.service import Service

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
NOT_STORED = "nothing is stored between requests; send the whole conversation"


class TemplateFields(Body):
    """What rules how a chat template renders any conversation."""

    chat_template_kwargs = served(JsonObject(), "further variables of the chat template")
    unserved = (
        *refused("the template is the model's, or --chat-template's", "chat_template"),
        *refused("hand them to the template in chat_template_kwargs", "documents"),
        *refused("the chat template writes what begins a prompt", "add_special_tokens"),
        *refused(
            "reasoning is told apart by --reasoning-parser",
            include_reasoning=True,
            reasoning_format=("auto", "deepseek"),
            reasoning_in_content=False,
            separate_reasoning=True,
            stream_reasoning=True,
            thinking_forced_open=False,
        ),
        *refused(
            "tool calls are told apart by --tool-call-parser", "chat_format", parse_tool_calls=True
        ),
        *refused("use /v1/completions or /generate for a prompt of token ids", "input_ids"),
        *refused("the chat template begins the answer", "generation_prompt"),
        *refused("the model has no such tasks", "task"),
    )

    def kwargs(self, effort: str | None) -> dict[str, Any]:
        """Variables of the template. effort: how much to think, as far as the template knows it."""
        found: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none":
            found |= {"enable_thinking": False, "thinking": False}
        return found | (self.chat_template_kwargs or {})


class LastMessageFields(TemplateFields):
    """What rules how a rendered conversation ends."""

    add_generation_prompt = served(
        Boolean(), "begin the assistant's turn; the default unless continue_final_message"
    )
    continue_final_message = served(
        Boolean(), "go on from the last message, which is the assistant's", default=False
    )

    def render(self, messages: list[dict[str, Any]], effort: str | None = None) -> dict[str, Any]:
        """Options of `ChatTemplate.render`.

        Raises: InvalidRequest: the last message is to be continued and cannot be.
        """
        name, continued = "continue_final_message", self.continue_final_message
        if continued and self.add_generation_prompt:
            raise InvalidRequest(
                f"{name}: cannot be true together with add_generation_prompt", param=name
            )
        if continued and messages[-1]["role"] != "assistant":
            role = messages[-1]["role"]
            raise InvalidRequest(
                f"{name}: the last message must be the assistant's, it is the {role}'s", param=name
            )
        begun = not continued if self.add_generation_prompt is None else self.add_generation_prompt
        return {
            "add_generation_prompt": begun,
            "continue_final_message": continued,
            "kwargs": self.kwargs(effort),
        }


class ChatBody(LastMessageFields, OpenAIFields):
    """The body of /v1/chat/completions."""

    messages = required(MESSAGES, "the conversation so far")
    max_completion_tokens = served(
        Integer(1),
        "tokens of the answer at most; else the model's default, or what the context leaves",
        names=("max_completion_tokens", "max_tokens", "n_predict"),
    )
    logprobs = served(Boolean(), "tokens have their log-probabilities", default=False)
    top_logprobs = served(
        Integer(0, MAX_LOGPROBS), "also those of so many likeliest tokens; needs logprobs"
    )
    tools = served(TOOLS, "functions that the model may call")
    tool_choice = served(TOOL_CHOICE, "whether and which tools are called; default auto")
    parallel_tool_calls = served(Boolean(), "an answer may call several tools", default=True)
    reasoning_effort = served(
        Choice(*EFFORTS),
        "a variable of the chat template, where it has it; none also sets enable_thinking to false",
    )
    unserved = (
        *refused("use tools and tool_choice", "function_call", "functions"),
        *refused("the model reads and writes text alone", "audio", modalities=["text"]),
        *refused("there is no search", "web_search_options"),
        *refused("nothing is moderated", "moderation"),
        *refused("ask for it in a message", verbosity="medium"),
        *refused("use continue_final_message, and join the texts", "echo"),
        *ignored("it would only be faster", "prediction", "service_tier"),
        *ignored(
            "prefixes are always cached",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
        ),
        *ignored("nothing is stored", "metadata", "store"),
        *ignored("names nobody to this server", "safety_identifier"),
    )

    def check(self, where: str, limits: ApiLimits) -> None:
        super().check(where, limits)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs to be true", param="top_logprobs")

    def chat(self, limits: ApiLimits) -> Chat:
        """The chat that it asks for."""
        messages = parse_messages(self.messages)
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        params = self.params(limits, self.max_completion_tokens, logprobs=logprobs)
        return Chat(
            messages=messages,
            tools=parse_tools(self.tools, self.tool_choice, parallel=self.parallel_tool_calls),
            render=self.render(messages, self.reasoning_effort),
            rules=self.rules(),
            params=replace(params, n=self.n, best_of=self.n, include_usage=self.include_usage),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation to be gone on with, whatever protocol it came by.

    Args:
        messages: as `parse_messages` gives them.
        tools: those that may be called; None: none.
        render: options of `ChatTemplate.render`.
        rules: what the answer must look like.
    """

    messages: list[dict[str, Any]]
    tools: ToolRequest | None = None
    render: dict[str, Any] = field(default_factory=dict)
    rules: list[OutputRule] = field(default_factory=list)
    params: GenerationParams


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A chat, ready to be generated. Args: new_parser: makes the parser of one choice's text."""

    prompt_ids: list[int]
    params: GenerationParams
    new_parser: Callable[[], AnswerParser] = AnswerParser


async def plan_chat(chat: Chat, service: Service) -> ChatPlan:
    """Renders a chat's prompt and compiles what rules its answer.

    Raises: InvalidRequest.
    """
    model_format = service.model_format
    messages, more = model_format.conversation(chat.messages, chat.tools)
    prompt_ids = await service.tokenizer.encode_chat(messages, **chat.render, **more)
    begun = chat.messages[-1]["content"] if chat.render.get("continue_final_message") else ""
    params = await model_format.constrained(
        chat.params, chat.rules, tools=chat.tools, prompt_ids=prompt_ids, begun=begun
    )
    return ChatPlan(prompt_ids, params, model_format.parser_factory(prompt_ids, chat.tools, begun))


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    service = request.app[SERVICE]
    body = await read_body(request, ChatBody)
    plan = await plan_chat(body.chat(service.limits), service)
    request_id = new_id("chatcmpl")
    with service.generator.start(
        [plan.prompt_ids], plan.params, request_id, body.request_id or request[REQUEST_ID]
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


ROUTES = [web.post("/v1/chat/completions", chat_completions)]
