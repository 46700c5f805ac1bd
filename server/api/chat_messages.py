"""Messages, tools and choices among them, as /v1/chat/completions has them.

The declarations say what is taken; `server.formats` makes of it what templates and models read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.errors import missing
from server.api.fields.bodies import Body, Record, Tagged, ignored, refused, required, served
from server.api.fields.caching import CACHE_BREAKPOINT, CACHE_CONTROL
from server.api.fields.kinds import Boolean, Checked, Choice, Either, Form, Items, JsonObject, Text

if TYPE_CHECKING:
    from server.generation.params import ApiLimits

ONLY_TEXT = "the model reads text parts alone"
NAME = Form("[A-Za-z0-9_.-]{1,64}", "1 to 64 letters, digits, _, - or .")


class TextPart(Body):
    type = required(Choice("text", "input_text", "output_text"), "a part of the text")
    text = required(Text(), "the text")
    cache_control = CACHE_CONTROL
    prompt_cache_breakpoint = CACHE_BREAKPOINT
    unserved = ignored("the text says it", "annotations", "citations", "logprobs")


class RefusalPart(Body):
    type = required(Choice("refusal"), "a part in which the assistant refused")
    refusal = required(Text(), "the text")


PART = Tagged(
    "type",
    {
        "text": TextPart,
        "input_text": TextPart,
        "output_text": TextPart,
        "refusal": RefusalPart,
    },
    reason=ONLY_TEXT,
)
CONTENT = Either(Text(), Items(Either(Text(), PART), "text parts"))


class CalledFunction(Body):
    name = required(Text(), "the function's name")
    arguments = served(
        Either(Text(), JsonObject()), "an object, or the text that the model wrote for one"
    )


class ToolCall(Body):
    id = served(Text(), "the call's id")
    type = served(Choice("function"), "the kind of call", default="function")
    function = required(Record(CalledFunction), "what was called")
    unserved = ignored("calls come in their order", "index")


class Message(Body):
    """What every message has. Other fields go to the chat template, which may read them."""

    open = True
    name = served(Text(), "who speaks")
    cache_control = CACHE_CONTROL


class UserMessage(Message):
    role = required(Choice("user"), "who speaks")
    content = required(CONTENT, "what was said")


class SystemMessage(Message):
    role = required(Choice("system", "developer"), "who speaks")
    content = required(CONTENT, "what was said")


class AssistantMessage(Message):
    role = required(Choice("assistant"), "who speaks")
    content = served(CONTENT, "what was said; may be left out where a tool was called")
    refusal = served(Text(), "how the assistant refused; the content where there is no other")
    tool_calls = served(Items(Record(ToolCall), "tool calls"), "which tools were called")
    function_call = served(Record(CalledFunction), "the older form of one tool call")
    reasoning_content = served(
        Text(), "what was thought", names=("reasoning_content", "reasoning", "thinking")
    )
    unserved = refused("the model reads and writes text alone", "audio")

    def check(self, where: str, limits: ApiLimits) -> None:
        """It may do without content where it calls tools, thinks or refuses."""
        said = (self.refusal, self.tool_calls, self.function_call, self.reasoning_content)
        if self.content is None and not any(said):
            raise missing(f"{where}.content", CONTENT.allowed(limits))


class ToolMessage(Message):
    role = required(Choice("tool", "function"), "who speaks")
    content = required(CONTENT, "what the tool answered")
    tool_call_id = served(Text(), "the id of the call")


MESSAGES = Items(
    Checked(
        Tagged(
            "role",
            {
                "system": SystemMessage,
                "developer": SystemMessage,
                "user": UserMessage,
                "assistant": AssistantMessage,
                "tool": ToolMessage,
                "function": ToolMessage,
            },
        )
    ),
    "messages",
    least=1,
)


class Function(Body):
    name = required(NAME, "what the model calls it by")
    description = served(Text(), "what it is for")
    parameters = served(JsonObject("a JSON schema"), "its arguments; none where left out")
    strict = served(Boolean(), "arguments must follow the schema", default=False)
    unserved = refused("every tool is shown to the model", "defer_loading")


class FunctionTool(Body):
    type = served(Choice("function"), "the kind of tool", default="function")
    function = required(Record(Function), "a function that the client runs")
    cache_control = CACHE_CONTROL
    unserved = refused("every tool is shown to the model", "defer_loading")


class FunctionName(Body):
    name = required(Text(), "one of the tools")


class NamedTool(Body):
    type = required(Choice("function"), "this function must be called")
    function = required(Record(FunctionName), "which")


class AllowedToolList(Body):
    mode = required(Choice("auto", "required"), "whether one must be called")
    tools = required(Items(Checked(Record(NamedTool)), "functions", least=1), "which may be called")


class AllowedTools(Body):
    type = required(Choice("allowed_tools"), "only some tools may be called")
    allowed_tools = required(Checked(Record(AllowedToolList)), "which, and whether one must be")


TOOLS = Items(Checked(Record(FunctionTool)), "tools")
ANY_TOOL = Choice("none", "auto", "required")
TOOL_CHOICE = Either(
    ANY_TOOL, Checked(Tagged("type", {"function": NamedTool, "allowed_tools": AllowedTools}))
)
