"""/v1/messages, in Anthropic's form: its body to a chat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from server.api.chat_plan import EFFORTS, Conversation, TemplateFields, answer_chat, plan_chat
from server.api.fields.bodies import Body, Record, Tagged, ignored, refused, required, served
from server.api.fields.caching import CACHE_CONTROL, TTL_S, CacheControl, Caching
from server.api.fields.generation import GeneratingBody
from server.api.fields.grammar import SCHEMA
from server.api.fields.kinds import (
    Boolean,
    Choice,
    Either,
    Form,
    Integer,
    Items,
    JsonObject,
    Text,
    Texts,
)
from server.api.incoming import read_body
from server.api.messages_answer import ANTHROPIC, AnthropicAnswer
from server.formats.thinking_budget import ThinkingLimit
from server.generation.stop_rules import MAX_CHARACTERS
from server.grammars.output_rules import OutputRule
from server.service import json_response

if TYPE_CHECKING:
    from server.generation.params import ApiLimits, GenerationParams

Message = dict[str, Any]
STOPS = Texts(most=16, altogether=MAX_CHARACTERS, single=False)
BILLING = "x-anthropic-billing-header:"
NO_SERVER_TOOLS = "the server runs no tools itself"


class TextBlock(Body):
    type = required(Choice("text"), "a part of the text")
    text = required(Text(), "the text")
    cache_control = CACHE_CONTROL
    unserved = ignored("the text says it", "citations")


TEXTS = Items(Tagged("type", {"text": TextBlock}, reason="the model reads text alone"), "blocks")
TEXT = Either(Text(), TEXTS)


class ToolResultBlock(Body):
    type = required(Choice("tool_result"), "what a tool answered")
    tool_use_id = required(Text(), "the id of its use")
    content = served(TEXT, "the answer")
    cache_control = CACHE_CONTROL
    unserved = (
        *ignored("the content says it", "is_error"),
        *refused("tools have names alone", "toolset_name"),
    )


class ToolUseBlock(Body):
    type = required(Choice("tool_use"), "a use of a tool by the assistant")
    id = required(Text(), "its id")
    name = required(Text(), "the tool's name")
    input = required(JsonObject(), "the arguments")
    cache_control = CACHE_CONTROL
    unserved = (
        *ignored("only the model uses tools", "caller"),
        *refused("tools have names alone", "toolset_name"),
    )


class ThinkingBlock(Body):
    type = required(Choice("thinking"), "what the assistant thought")
    thinking = required(Text(), "the text")
    unserved = ignored("thoughts are not signed", "signature")


class RedactedBlock(Body):
    type = required(Choice("redacted_thinking"), "thoughts that cannot be read, and are left out")
    unserved = ignored("it cannot be read", "data")


class SpokenMessage(Body):
    role = required(Choice("user", "system"), "who speaks")
    content = required(
        Either(
            Text(),
            Items(
                Tagged(
                    "type",
                    {"text": TextBlock, "tool_result": ToolResultBlock},
                    reason="the model reads text alone",
                ),
                "blocks",
            ),
        ),
        "what was said",
    )
    unserved = refused("a message is shown wherever it stands", "output_config", clear_at="never")

    def chat(self) -> list[Message]:
        """Results of tools are messages of their own; the text follows them."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        found: list[Message] = []
        text = ""
        for block in self.content:
            if isinstance(block, TextBlock):
                text += block.text
            else:
                result = joined(block.content)
                told = {"role": "tool", "tool_call_id": block.tool_use_id, "content": result}
                found.append(told | _kept(block, *_blocks(block.content)))
        if text or not found:
            texts = [block for block in self.content if isinstance(block, TextBlock)]
            found.append({"role": self.role, "content": text, **_kept(*texts)})
        return found


class AnswerMessage(Body):
    role = required(Choice("assistant"), "who speaks")
    content = required(
        Either(
            Text(),
            Items(
                Tagged(
                    "type",
                    {
                        "text": TextBlock,
                        "thinking": ThinkingBlock,
                        "redacted_thinking": RedactedBlock,
                        "tool_use": ToolUseBlock,
                    },
                    reason=NO_SERVER_TOOLS,
                ),
                "blocks",
            ),
        ),
        "what was said; as the last message, the beginning of the answer",
    )

    def chat(self) -> list[Message]:
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        text = thoughts = ""
        calls = []
        for block in self.content:
            if isinstance(block, TextBlock):
                text += block.text
            elif isinstance(block, ThinkingBlock):
                thoughts += block.thinking
            elif isinstance(block, ToolUseBlock):
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
        message: Message = {"role": self.role, "content": text, **_kept(*self.content)}
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = calls
        return [message]


class MessageTool(Body):
    type = served(Choice("custom"), "a tool that the client runs", default="custom")
    name = required(
        Form("[A-Za-z0-9_.-]{1,128}", "1 to 128 letters, digits, _, - or ."),
        "what the model calls it by",
    )
    description = served(Text(), "what it is for")
    input_schema = required(JsonObject("a JSON schema"), "its arguments")
    strict = served(Boolean(), "arguments must follow the schema", default=False)
    cache_control = CACHE_CONTROL
    unserved = (
        *refused("every tool is shown to the model", "defer_loading"),
        *refused("only the model uses tools", allowed_callers=["direct"]),
        *ignored("arguments are always streamed as they are written", "eager_input_streaming"),
        *ignored("the chat template has no place for them", "input_examples"),
    )

    def openai(self) -> Message:
        """The tool as /v1/chat/completions has it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
            "strict": self.strict,
        }
        return {"type": "function", "function": function, **_kept(self)}


class ToolUseChoice(Body):
    type = required(Choice("auto", "any", "none"), "whether a tool is used")
    disable_parallel_tool_use = served(Boolean(), "at most one tool is used", default=False)


class NamedToolUse(Body):
    type = required(Choice("tool"), "this tool must be used")
    name = required(Text(), "one of the tools")
    disable_parallel_tool_use = served(Boolean(), "at most one tool is used", default=False)


class Thinking(Body):
    type = required(
        Choice("enabled", "disabled", "adaptive"), "sets enable_thinking of the chat template"
    )
    budget_tokens = served(Integer(0), "tokens of the thinking at most")
    unserved = (
        *ignored("thoughts are not signed", "block_binding"),
        *refused("thinking is shown whole", display="summarized"),
    )


class OutputFormat(Body):
    type = required(Choice("json_schema"), "JSON of a schema")
    schema = required(SCHEMA, "the schema")


class OutputConfig(Body):
    effort = served(Choice(*EFFORTS), "a variable of the chat template, where it has it")
    format = served(Record(OutputFormat), "what the answer must look like")
    unserved = refused("thinking is bounded by max_tokens alone", "task_budget")


class ConversationBody(TemplateFields, GeneratingBody):
    """What both endpoints of Anthropic's have."""

    messages = required(
        Items(
            Tagged(
                "role", {"user": SpokenMessage, "system": SpokenMessage, "assistant": AnswerMessage}
            ),
            "messages",
            least=1,
        ),
        "the conversation so far",
    )
    system = served(TEXT, "a system message before it")
    stop = served(STOPS, "texts that end the answer", names=("stop_sequences",))
    tools = served(Items(Record(MessageTool), "tools"), "what the model may use")
    tool_choice = served(
        Tagged(
            "type",
            {
                "auto": ToolUseChoice,
                "any": ToolUseChoice,
                "none": ToolUseChoice,
                "tool": NamedToolUse,
            },
        ),
        "whether and which tools are used; default auto",
    )
    thinking = served(Record(Thinking), "whether to think")
    output_config = served(Record(OutputConfig), "how much to think, and the answer's form")
    output_format = served(Record(OutputFormat), "the older place of output_config.format")
    cache_control = CACHE_CONTROL
    unserved = (
        *refused("nothing is stored between requests", "container"),
        *refused(
            "nothing is stored between requests; tool_runner(thread=False) sends all", "thread"
        ),
        *refused("send what the model is to see", "compaction"),
        *ignored("the model sees the whole conversation", "context_management"),
        *refused(NO_SERVER_TOOLS, "mcp_servers"),
        *refused("there is one model", "fallback_credit_token", "fallbacks"),
        *refused("this server is where it is", "inference_geo"),
        *ignored("it would only be faster", "service_tier", "speed"),
        *ignored("nothing is stored", "metadata"),
        *ignored("tells of caches at the vendor", "diagnostics"),
        *ignored("for the vendor", "betas", "billing_policy", "user_profile_id", "workspace_id"),
    )

    def conversation(self) -> Conversation:
        """The conversation that is to be gone on with."""
        messages = [made for message in self.messages for made in message.chat()]
        if self.system is not None:
            messages[:0] = _system(self.system)
        # An assistant's message at the end is a beginning that the model goes on from.
        last = messages[-1]
        continued = last["role"] == "assistant" and "tool_calls" not in last
        choice, parallel = _choice(self.tool_choice)
        return Conversation(
            messages=messages,
            tools=None if self.tools is None else [tool.openai() for tool in self.tools],
            tool_choice=choice,
            parallel_tool_calls=parallel,
            caching=_caching(self.cache_control),
            render={
                "add_generation_prompt": not continued,
                "continue_final_message": continued,
                "kwargs": self._kwargs(),
            },
        )

    def thinking_limit(self) -> ThinkingLimit | None:
        own = None if self.thinking is None else self.thinking.budget_tokens
        if own is None:
            return super().thinking_limit()
        return ThinkingLimit(own, "thinking.budget_tokens")

    def _kwargs(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.thinking is not None:
            found["enable_thinking"] = self.thinking.type != "disabled"
        effort = None if self.output_config is None else self.output_config.effort
        return found | self.kwargs(effort)

    def rules(self) -> list[OutputRule]:
        found = super().rules()
        if self.output_config is not None and self.output_config.format is not None:
            schema = self.output_config.format.schema
            found.append(OutputRule("output_config.format.schema", "json", schema))
        if self.output_format is not None:
            found.append(OutputRule("output_format.schema", "json", self.output_format.schema))
        return found


class MessageBody(ConversationBody):
    """The body of /v1/messages."""

    max_tokens = required(Integer(1), "tokens of the answer at most")

    def generation(self, limits: ApiLimits) -> GenerationParams:
        return self.params(limits, self.max_tokens)


class CountTokensBody(ConversationBody):
    """The body of /v1/messages/count_tokens."""

    max_tokens = served(Integer(1), "changes no count")

    def generation(self, limits: ApiLimits) -> GenerationParams:
        return self.params(limits, None)


def joined(content: str | list[TextBlock] | None) -> str:
    """The text of a string, or of text blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block.text for block in content)


def _blocks(content: str | list[TextBlock] | None) -> list[TextBlock]:
    return content if isinstance(content, list) else []


def _system(given: str | list[TextBlock]) -> list[Message]:
    """The system message, if there is one. Claude Code's account of a request, which begins it and
    differs each time, is for its vendor's ledger and tells the model nothing: it is left out."""
    kept: Message = {}
    if isinstance(given, list):
        if given and given[0].text.startswith(BILLING) and "\n" not in given[0].text.strip():
            given = given[1:]
            if not given:
                return []
        kept, text = _kept(*given), joined(given)
    else:
        first, _, rest = given.partition("\n")
        text = rest if first.startswith(BILLING) else given
        if given and not text:
            return []
    return [{"role": "system", "content": text, **kept}]


def _kept(*blocks: Body) -> Message:
    """The breakpoint of a message or a tool, of the longest time that one of its blocks asks."""
    asked = [block.given["cache_control"] for block in blocks if block.given.get("cache_control")]
    return {"cache_control": max(asked, key=lambda one: one.get("ttl") == "1h")} if asked else {}


def _caching(control: CacheControl | None) -> Caching:
    return Caching() if control is None else Caching(TTL_S[control.ttl])


def _choice(given: ToolUseChoice | NamedToolUse | None) -> tuple[Any, bool]:
    """The tool choice in OpenAI's form, and whether several may be called."""
    if given is None:
        return None, True
    parallel = not given.disable_parallel_tool_use
    if isinstance(given, NamedToolUse):
        return {"type": "function", "function": {"name": given.name}}, parallel
    return {"auto": "auto", "any": "required", "none": "none"}[given.type], parallel


async def messages(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages."""
    body = await read_body(request, MessageBody)
    return await answer_chat(request, body, AnthropicAnswer, prefix="msg", form=ANTHROPIC)


async def count_tokens(request: web.Request) -> web.Response:
    """POST /v1/messages/count_tokens: the tokens of the prompt that /v1/messages would make."""
    plan = await plan_chat(request, await read_body(request, CountTokensBody), counted=True)
    return json_response({"input_tokens": len(plan.prompt_ids)})


ROUTES = [
    web.post("/v1/messages", messages),
    web.post("/v1/messages/count_tokens", count_tokens),
]
