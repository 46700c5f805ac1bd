"""/v1/responses: its body to a chat. Nothing is stored: a conversation is sent whole."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from runtime.errors import wrong
from server.api.chat_messages import ANY_TOOL, CONTENT, NAME
from server.api.chat_plan import EFFORTS, Conversation, TemplateFields, answer_chat
from server.api.fields.bodies import Body, Record, Tagged, ignored, refused, required, served
from server.api.fields.caching import PromptCacheFields
from server.api.fields.generation import INCLUDE_PROGRESS, INCLUDE_TIMINGS, GeneratingBody
from server.api.fields.grammar import (
    SCHEMA,
    ObjectFormat,
    TextFormat,
    format_rules,
)
from server.api.fields.kinds import (
    Boolean,
    Checked,
    Choice,
    Either,
    Integer,
    Items,
    JsonObject,
    Text,
)
from server.api.incoming import read_body
from server.api.responses_answer import RESPONSES, ResponseAnswer
from server.formats.thinking_budget import ThinkingLimit
from server.grammars.output_rules import OutputRule

if TYPE_CHECKING:
    from server.generation.params import ApiLimits, GenerationParams

Item = dict[str, Any]
NOT_STORED = "nothing is stored between requests; send the whole conversation"
NO_ASYNC = "a call ends the answer, and its output comes with the next request"
FROM_EARLIER = ignored("repeats what an earlier response said", "id", "phase", "status")


class InputMessage(Body):
    type = served(Choice("message"), "the kind of item", default="message")
    role = required(Choice("system", "developer", "user", "assistant"), "who speaks")
    content = required(Checked(CONTENT), "what was said")
    unserved = FROM_EARLIER


class ReasoningText(Body):
    type = required(Choice("reasoning_text"), "a part of what was thought")
    text = required(Text(), "the text")


class ReasoningItem(Body):
    type = required(Choice("reasoning"), "what the assistant thought before what follows")
    content = served(Items(Record(ReasoningText), "reasoning texts"), "the thoughts")
    unserved = (
        *ignored("repeats what an earlier response said", "id", "status"),
        *ignored("only whole thoughts are read", "encrypted_content", "summary"),
    )


class FunctionCall(Body):
    type = required(Choice("function_call"), "a call that the assistant made")
    call_id = required(Text(), "the call's id")
    name = required(Text(), "the function's name")
    arguments = required(Text(), "the text that the model wrote for them")
    unserved = (
        *ignored("repeats what an earlier response said", "id", "status"),
        *refused("functions have names alone", "caller", "namespace"),
        *refused(NO_ASYNC, "async"),
    )


class FunctionCallOutput(Body):
    type = required(Choice("function_call_output"), "what a function answered")
    call_id = required(Text(), "the call's id")
    output = required(Checked(CONTENT), "the answer")
    unserved = (
        *ignored("repeats what an earlier response said", "id", "name", "status"),
        *refused("functions have names alone", "caller", "namespace"),
    )


INPUT = Either(
    Text(),
    Items(
        Tagged(
            "type",
            {
                "message": InputMessage,
                "reasoning": ReasoningItem,
                "function_call": FunctionCall,
                "function_call_output": FunctionCallOutput,
            },
            default="message",
        ),
        "items",
        least=1,
    ),
)


class ResponseTool(Body):
    type = required(Choice("function"), "a function that the client runs")
    name = required(NAME, "what the model calls it by")
    description = served(Text(), "what it is for")
    parameters = served(JsonObject("a JSON schema"), "its arguments; none where left out")
    strict = served(Boolean(), "arguments must follow the schema", default=False)
    unserved = (
        *refused("every tool is shown to the model", "defer_loading"),
        *refused("only the model calls functions", allowed_callers=["direct"]),
        *refused(NO_ASYNC, "async"),
        *ignored("the client knows what its function gives", "output_schema"),
    )

    def openai(self) -> Item:
        """The tool as /v1/chat/completions has it."""
        function = {name: getattr(self, name) for name in ("name", "description", "parameters")}
        return {"type": "function", "function": {**function, "strict": self.strict}}


class ResponseToolName(Body):
    type = required(Choice("function"), "this function must be called")
    name = required(Text(), "one of the tools")


class ResponseToolNames(Body):
    type = required(Choice("allowed_tools"), "only some tools may be called")
    mode = required(Choice("auto", "required"), "whether one must be called")
    tools = required(
        Items(Checked(Record(ResponseToolName)), "functions", least=1), "which may be called"
    )


class ResponseSchema(Body):
    type = required(Choice("json_schema"), "JSON of a schema")
    schema = required(SCHEMA, "the schema")
    name = served(Text(), "for the client's own use")
    description = served(Text(), "for the client's own use")
    unserved = ignored("a schema is always enforced", "strict")


class ResponseStreamOptions(Body):
    include_timings = INCLUDE_TIMINGS
    include_progress = INCLUDE_PROGRESS
    unserved = (
        *ignored("events are not padded", "include_obfuscation"),
        *ignored("the last event tells the usage", "include_usage"),
    )


class ResponseText(Body):
    format = served(
        Tagged(
            "type",
            {"text": TextFormat, "json_object": ObjectFormat, "json_schema": ResponseSchema},
        ),
        "what the text must look like",
    )
    unserved = refused("ask for it in the instructions", verbosity="medium")


class ResponseReasoning(Body):
    effort = served(
        Choice(*EFFORTS),
        "a variable of the chat template, where it has it; none also sets enable_thinking to false",
    )
    max_tokens = served(Integer(0), "tokens of the reasoning at most")
    unserved = (
        *ignored("reasoning is given whole", "generate_summary", "summary"),
        *refused("reasoning of earlier turns is as the input has it", context="auto"),
        *refused("the model reasons in one way", mode="standard"),
    )


class ResponseBody(TemplateFields, PromptCacheFields, GeneratingBody):
    """The body of /v1/responses."""

    input = required(INPUT, "the conversation so far")
    instructions = served(Text(), "a system message before it")
    max_output_tokens = served(
        Integer(1), "tokens of the answer at most; else the model's default, or what fits"
    )
    tools = served(Items(Record(ResponseTool), "function tools"), "what the model may call")
    tool_choice = served(
        Either(
            ANY_TOOL,
            Checked(
                Tagged("type", {"function": ResponseToolName, "allowed_tools": ResponseToolNames})
            ),
        ),
        "whether and which tools are called; default auto",
    )
    parallel_tool_calls = served(Boolean(), "an answer may call several tools", default=True)
    text = served(Record(ResponseText), "what the answer's text must look like")
    reasoning = served(Record(ResponseReasoning), "how much to think")
    stream_options = served(Record(ResponseStreamOptions), "of the answer's events")
    metadata = served(JsonObject(), "repeated in the response")
    user = served(Text(), "repeated in the response")
    include = served(
        Items(
            Choice(
                "code_interpreter_call.outputs",
                "computer_call_output.output.image_url",
                "file_search_call.results",
                "message.input_image.image_url",
                "reasoning.encrypted_content",
                "web_search_call.action.sources",
                "web_search_call.results",
            ),
            "names",
        ),
        "parts of items that are never made here; log-probabilities are not served",
    )
    unserved = (
        *refused(
            NOT_STORED,
            "conversation",
            "previous_input_messages",
            "previous_response",
            "previous_response_id",
            "prompt",
        ),
        *refused("requests are answered while the client waits", "background"),
        *refused("input that does not fit is refused, not cut", truncation="disabled"),
        *refused("send what the model is to see", "context_management"),
        *refused("use logprobs on /v1/chat/completions", top_logprobs=0),
        *refused("the answer has one form", "enable_response_messages"),
        *refused("nothing is moderated", "moderation"),
        *ignored("there are no such tools", "max_tool_calls"),
        *ignored("there are no images", "image"),
        *ignored("requests are answered at once", "background_options"),
        *ignored("it would only be faster", "access_programs", "service_tier"),
        *ignored("nothing is stored", "store"),
        *ignored("names nobody to this server", "safety_identifier"),
    )

    def conversation(self) -> Conversation:
        """The conversation that is to be gone on with."""
        messages = _messages(self.input)
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        effort = None if self.reasoning is None else self.reasoning.effort
        return Conversation(
            messages=messages,
            tools=None if self.tools is None else [tool.openai() for tool in self.tools],
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            caching=self.caching(),
            render={"kwargs": self.kwargs(effort)},
        )

    def generation(self, limits: ApiLimits) -> GenerationParams:
        """What it asks of the generation core."""
        params = self.params(limits, self.max_output_tokens)
        options = self.stream_options
        if options is None:
            return params
        return replace(
            params,
            include_timings=options.include_timings,
            include_progress=options.include_progress,
        )

    def thinking_limit(self) -> ThinkingLimit | None:
        own = None if self.reasoning is None else self.reasoning.max_tokens
        if own is None:
            return super().thinking_limit()
        return ThinkingLimit(own, "reasoning.max_tokens")

    def rules(self) -> list[OutputRule]:
        wanted = None if self.text is None else self.text.format
        if isinstance(wanted, ResponseSchema):
            return [*super().rules(), OutputRule("text.format.schema", "json", wanted.schema)]
        return super().rules() + format_rules(wanted, "text.format")


def _messages(given: str | list[Body]) -> list[Item]:
    """Chat messages of `input`. Reasoning and function calls join the assistant's message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Item] = []
    thought = ""  # reasoning that waits for its assistant's message
    for item in given:
        if isinstance(item, ReasoningItem):
            thought = "".join(part.text for part in item.content or ())
        elif isinstance(item, InputMessage):
            messages.append({"role": item.role, "content": item.content})
        elif isinstance(item, FunctionCall):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif isinstance(item, FunctionCallOutput):
            output = {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
            messages.append(output)
        if thought and messages and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"], thought = thought, ""
    if not messages:
        raise wrong("input", "only reasoning", "a list with at least one message")
    return messages


async def responses(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses."""
    body = await read_body(request, ResponseBody)
    repeated = {**body.given, "temperature": body.temperature, "top_p": body.top_p}
    return await answer_chat(
        request, body, partial(ResponseAnswer, request=repeated), prefix="resp", form=RESPONSES
    )


ROUTES = [web.post("/v1/responses", responses)]
