"""What every chat amounts to, whatever protocol it came by: fields of how it is rendered, the
conversation, the plan of its answer, and the answer's way out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from runtime.errors import InvalidRequest
from server.api.answers import OPENAI, Planned, answer
from server.api.fields.bodies import Body, refused, served
from server.api.fields.caching import Caching
from server.api.fields.kinds import Boolean, Checked, Integer, JsonObject
from server.api.incoming import beside
from server.api.prompt_pins import prompt_pins
from server.formats.conversation import parse_messages
from server.formats.thinking_budget import ThinkingLimit
from server.formats.tools import parse_tools
from server.service import SERVICE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiohttp import web

    from server.api.answers import Answer, StreamForm
    from server.api.fields.kinds import Reading
    from server.formats.model_format import AnswerParser
    from server.formats.tools import ToolRequest
    from server.generation.generator import Generation
    from server.generation.params import ApiLimits, GenerationParams
    from server.grammars.output_rules import OutputRule
    from server.service import Service
    from server.text.chat_template import Message
    from server.text.least_tokens import TokenLimit

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class TemplateVariables(Checked):
    """An object whose values a chat template may read."""

    def __init__(self) -> None:
        super().__init__(JsonObject())

    def read(self, value: Any, where: str, reading: Reading) -> dict[str, Any]:
        found: dict[str, Any] = super().read(value, where, reading)
        for name in found:
            if name not in reading.template_words:
                reading.note(f"{where}.{name}")
        return found


class TemplateFields(Body):
    """What rules how a chat template renders any conversation."""

    chat_template_kwargs = served(TemplateVariables(), "further variables of the chat template")
    thinking_budget = served(
        Integer(-1),
        "tokens of the reasoning at most, where --reasoning-parser tells it apart; -1: no bound",
        names=(
            "thinking_token_budget",
            "max_thinking_tokens",
            "thinking_budget_tokens",
            "reasoning_budget_tokens",
        ),
    )
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

    def thinking_limit(self) -> ThinkingLimit | None:
        """The bound on the reasoning; None: that of the answer."""
        most = self.thinking_budget
        name = type(self).thinking_budget.names[0]
        return None if most is None or most < 0 else ThinkingLimit(most, name)

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

    def render(
        self, messages: Sequence[dict[str, Any]], effort: str | None = None
    ) -> dict[str, Any]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation to be gone on with.

    Args:
        messages, tools, tool_choice: in OpenAI's form, right by themselves.
        parallel_tool_calls: an answer may call several tools.
        caching: what of the prompt is to stay cached; breakpoints are in `messages` and `tools`.
        render: options of `ChatTemplate.render`.
    """

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    caching: Caching = field(default_factory=Caching)
    render: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A chat, ready to be generated. Args: new_parser: makes the parser of one choice's text."""

    prompt_ids: list[int]
    params: GenerationParams
    new_parser: Callable[[], AnswerParser]


class ChatRequest(Protocol):
    """A body that asks to go on with a conversation, in whatever form.

    `conversation` may take long, so it is called beside the event loop; `rules` says what the
    answer must look like.
    """

    @property
    def request_id(self) -> str | None: ...

    @property
    def stream(self) -> bool: ...

    def conversation(self) -> Conversation: ...

    def generation(self, limits: ApiLimits) -> GenerationParams: ...

    def rules(self) -> list[OutputRule]: ...

    def thinking_limit(self) -> ThinkingLimit | None: ...


async def answer_chat(
    request: web.Request,
    body: ChatRequest,
    new_answer: Callable[[Generation, Service, Callable[[], AnswerParser]], Answer],
    *,
    prefix: str,
    form: StreamForm = OPENAI,
) -> web.StreamResponse:
    """Goes on with a conversation, and answers; see `answer`.

    Args: new_answer: makes the answer; it is given what makes a parser of one choice's text.
    Raises: InvalidRequest.
    """
    service = request.app[SERVICE]

    async def planned() -> Planned:
        plan = await plan_chat(request, body)
        return Planned(
            [plan.prompt_ids],
            plan.params,
            lambda generation: new_answer(generation, service, plan.new_parser),
        )

    return await answer(
        request, planned, stream=body.stream, form=form, prefix=prefix, client_id=body.request_id
    )


async def plan_chat(request: web.Request, body: ChatRequest, *, counted: bool = False) -> ChatPlan:
    """Renders a chat's prompt, and checks what rules its answer.

    Args: counted: the prompt is only made to be counted, so it may be longer than the context.
    Raises: InvalidRequest.
    """
    service = request.app[SERVICE]
    model_format = service.model_format
    params = body.generation(service.limits)

    prompt_ids, tools, begun, more = await beside(
        request, lambda: _rendered(body.conversation(), service, counted=counted)
    )
    params = replace(params, **more)
    params = await model_format.constrained(
        params,
        body.rules(),
        tools=tools,
        prompt_ids=prompt_ids,
        begun=begun,
        thinking=body.thinking_limit(),
        client=request.remote or "",
    )
    return ChatPlan(prompt_ids, params, model_format.parser_factory(prompt_ids, tools, begun))


def _rendered(
    conversation: Conversation, service: Service, *, counted: bool
) -> tuple[list[int], ToolRequest | None, str, dict[str, Any]]:
    """The prompt, the tools that may be called, the message that is gone on from, and further
    parameters."""
    messages, tools = _parsed(conversation)
    most = service.limits.counted if counted else service.limits.prompt

    def encode(messages: list[Message]) -> list[int]:
        return _encode(conversation, messages, tools, service, most)

    ids = encode(messages)
    begun = messages[-1]["content"] if conversation.render.get("continue_final_message") else ""
    more: dict[str, Any] = {}
    if not counted:
        given, offered = conversation.messages, conversation.tools or ()
        more["pins"] = prompt_pins(given, offered, conversation.caching, messages, ids, encode)
        more["goes_on"] = any(message["role"] == "assistant" for message in messages)
    return ids, tools, begun, more


def encode_conversation(conversation: Conversation, service: Service) -> list[int]:
    """The token ids of a conversation's prompt, on the calling thread. Raises: InvalidRequest."""
    return _encode(conversation, *_parsed(conversation), service, service.limits.counted)


def _parsed(conversation: Conversation) -> tuple[list[Message], ToolRequest | None]:
    """The messages, and the tools that the answer may call."""
    messages = parse_messages(conversation.messages)
    if not conversation.tools and conversation.tool_choice is None:
        return messages, None
    tools = parse_tools(
        conversation.tools,
        conversation.tool_choice,
        parallel=conversation.parallel_tool_calls,
    )
    return messages, tools


def _encode(
    conversation: Conversation,
    messages: list[Message],
    tools: ToolRequest | None,
    service: Service,
    most: TokenLimit,
) -> list[int]:
    messages, more = service.model_format.conversation(messages, tools)
    return service.tokenizer.encode_chat(messages, most=most, **conversation.render, **more)
