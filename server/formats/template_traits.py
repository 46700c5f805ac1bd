"""What a chat template makes of tools, calls and results, found by rendering samples with it.

Templates declare nothing. One reads the tools from a variable `tools`, another from a variable of
its own or from a field of the system message; one takes a call's arguments as an object, another
as JSON text; some refuse ids of another form than their own, or leave out what they do not know
without a word. A sample shows all of that: what was taken stands in the text.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from runtime.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from server.text.chat_template import ChatTemplate, Message

_SYSTEM, _QUESTION, _ANSWER, _RESULT = (
    f"sample-of-a-{what}" for what in ("rule", "question", "answer", "result")
)
_NAME, _KEY, _VALUE = "sample_name", "sample_key", "sample value"
_PARAMETERS = {"type": "object", "properties": {_KEY: {"type": "string", "description": "A key."}}}
_FUNCTION = {"name": _NAME, "description": "A sample.", "parameters": _PARAMETERS}
_TOOLS = [{"type": "function", "function": {**_FUNCTION}}]
_IDS = {"any": "call_0123456789abcdef01234567", "nine": "a1B2c3D4e"}
# Among several variables that show the tools: the usual names, then lists for JSON calls.
_USUAL_VARIABLES = ("tools", "xml_tools", "functions", "available_tools")


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What has to be done to a conversation so that a template shows all of it.

    Args:
        system: a system message is shown.
        tools_in: the template reads the tools from a variable, or from the field `tools` of the
            system message; "text": from neither, so that they must be told in words.
        tools_variable: the name of that variable.
        tools_as_json: the tools are read as JSON text, not as a list.
        needs_system: a variable's tools are shown only where there is a system message.
        calls: the calls of an assistant's message are shown.
        results: messages of the role "tool" are shown.
        arguments_as_json: a call's arguments are taken as JSON text, not as an object.
        takes_odd_arguments: arguments that are no JSON object do no harm.
        empty_content: the content of a message with calls and no words.
        one_call: a message with several calls is refused.
        nine_character_ids: ids of calls must be nine letters and digits.
        parts: content is taken as a list of parts only.
    """

    system: bool = True
    tools_in: Literal["variable", "system", "text"] = "text"
    tools_variable: str = "tools"
    tools_as_json: bool = False
    needs_system: bool = False
    calls: bool = False
    results: bool = False
    arguments_as_json: bool = False
    takes_odd_arguments: bool = True
    empty_content: str | None = ""
    one_call: bool = False
    nine_character_ids: bool = False
    parts: bool = False


def find_traits(template: ChatTemplate, *, tools: bool) -> TemplateTraits:
    """The traits of the template for conversations with tools, or of the one for those without.

    Costs about thirty renderings of short conversations.
    """
    sample = _Sample(template)
    traits = TemplateTraits()
    if not sample.shows(traits, [_user()], _QUESTION):
        in_parts = replace(traits, parts=True)
        traits = in_parts if sample.shows(in_parts, [_user()], _QUESTION) else traits
    traits = replace(traits, system=sample.shows(traits, [_system(), _user()], _SYSTEM))
    if tools:
        traits = next(
            (found for found in _placements(template, traits) if sample.shows_tools(found)), traits
        )
    return sample.with_history(traits, tools=tools)


def _placements(template: ChatTemplate, traits: TemplateTraits) -> Iterator[TemplateTraits]:
    """Where the tools may belong, the likeliest first."""
    names = template.variables(tools=True)
    usual = [name for name in _USUAL_VARIABLES if name in names]
    others = sorted(n for n in names - set(usual) if "tool" in n or "function" in n)
    variables = [(name, as_json) for name in (*usual, *others) for as_json in (False, True)]
    for needs_system in (False, True) if traits.system else (False,):
        placed = replace(traits, tools_in="variable", needs_system=needs_system)
        for name, as_json in variables:
            yield replace(placed, tools_variable=name, tools_as_json=as_json)
    for as_json in (True, False):
        yield replace(traits, tools_in="system", tools_as_json=as_json)


def place_tools(
    messages: Sequence[Message], tools: list[dict[str, Any]], traits: TemplateTraits
) -> tuple[list[Message], dict[str, Any]]:
    """Messages and options of rendering with which the template reads these tools.

    Args: traits: `tools_in` is not "text".
    """
    placed = list(messages)
    needs_system = traits.needs_system or traits.tools_in == "system"
    if needs_system and placed[0]["role"] != "system":
        placed.insert(0, {"role": "system", "content": ""})
    value: Any = json.dumps(tools, ensure_ascii=False) if traits.tools_as_json else tools
    if traits.tools_in == "variable":
        return placed, {"tools": value, "tools_variable": traits.tools_variable}
    placed[0] = {**placed[0], "tools": value}
    return placed, {}


class _Sample:
    """Renders samples with one model's template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def text(self, traits: TemplateTraits, messages: list[Message], *, tools: bool) -> str:
        """The prompt, with tools where the template reads them; empty where it is refused."""
        options: dict[str, Any] = {}
        if tools and traits.tools_in != "text":
            messages, options = place_tools(messages, _TOOLS, traits)
        if traits.parts:
            messages = [{**m, "content": in_parts(m.get("content"))} for m in messages]
        try:
            return self._template.render(messages, **options)
        except InvalidRequest:
            return ""

    def shows(self, traits: TemplateTraits, messages: list[Message], *words: str) -> bool:
        text = self.text(traits, messages, tools=False)
        return all(word in text for word in words)

    def shows_tools(self, traits: TemplateTraits) -> bool:
        """Whether the tools are shown, with and without a system message of the client's."""
        first = [[_user()], [_system(), _user()]] if traits.system else [[_user()]]
        for messages in first:
            text = self.text(traits, messages, tools=True)
            if not (_NAME in text and _KEY in text and _QUESTION in text):
                return False
        return True

    def with_history(self, traits: TemplateTraits, *, tools: bool) -> TemplateTraits:
        """The traits with what is known of calls and results."""
        shapes = itertools.product((False, True), ("", None), (False, True))
        for as_json, empty, nine in shapes:
            shape = replace(
                traits,
                calls=True,
                results=True,
                arguments_as_json=as_json,
                empty_content=empty,
                nine_character_ids=nine,
            )
            text = self._history(shape, tools=tools)
            if _NAME in text and _VALUE in text and _RESULT in text:
                return self._with_limits(shape, tools=tools)
        spoken = [_user(), {"role": "assistant", "content": _ANSWER}, _result(_IDS["any"])]
        return replace(
            traits, results=_RESULT in self.text(traits, spoken, tools=tools).partition(_ANSWER)[2]
        )

    def _with_limits(self, shape: TemplateTraits, *, tools: bool) -> TemplateTraits:
        odd = self._history(shape, '{"cut o', tools=tools)
        return replace(
            shape,
            takes_odd_arguments=_RESULT in odd,
            one_call=_RESULT not in self._history(shape, count=2, tools=tools),
        )

    def _history(
        self, shape: TemplateTraits, arguments: Any = None, count: int = 1, *, tools: bool
    ) -> str:
        """The prompt after a call and its result, from the question on."""
        if arguments is None:
            arguments = {_KEY: _VALUE}
            arguments = json.dumps(arguments) if shape.arguments_as_json else arguments
        call_id = _IDS["nine" if shape.nine_character_ids else "any"]
        ids = [call_id, call_id[::-1]][:count]
        function = {"name": _NAME, "arguments": arguments}
        calls = [{"id": one, "type": "function", "function": function} for one in ids]
        said = {"role": "assistant", "content": shape.empty_content, "tool_calls": calls}
        messages = [_user(), said, *map(_result, ids)]
        return self.text(shape, messages, tools=tools).partition(_QUESTION)[2]


def in_parts(content: Any) -> Any:
    """Content as a list of parts; None stays."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _system() -> Message:
    return {"role": "system", "content": _SYSTEM}


def _user() -> Message:
    return {"role": "user", "content": _QUESTION}


def _result(call_id: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": _RESULT}
