"""A conversation, from OpenAI's form to the one that the model's chat template shows.

`parse_messages` makes of messages what templates take; what a message may hold is declared in
server.api, here it is right by itself. `fit` sees to it that nothing is lost: where a template has
no place for tools, calls or results, they are told in words, the tools in the system message, calls
in the assistant's text as the model's family writes them, results in the user's.
"""

from __future__ import annotations

import hashlib
import json
from itertools import groupby
from typing import TYPE_CHECKING, Any

import orjson

from server.formats.template_traits import in_parts, place_tools
from server.formats.tool_parser import CALL_ID_CHARACTERS, is_mistral_call_id
from server.text.json_bounds import is_deeper, is_too_much

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from server.formats.template_traits import TemplateTraits
    from server.formats.tool_families import ToolFamily
    from server.formats.tools import Tool
    from server.text.chat_template import Message

# The newer names mean the same; templates know the old ones.
_OLD_ROLES = {"developer": "system", "function": "tool"}
# Fields that are read here or say nothing to the model; all others go to the template as they are,
# except nulls.
_READ = frozenset(
    {"role", "content", "refusal", "function_call", "tool_calls"}
    | {"reasoning_content", "reasoning", "thinking", "cache_control"}
)
_INSTRUCTION = """\
You may call functions to help with the user's request. Here they are, one in each line:
<tools>
{tools}
</tools>

To call a function, answer with its name and arguments, written like this:
{call}"""


def parse_messages(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Messages as templates take them: content a string, tool-call arguments objects."""
    return [_message(message) for message in messages]


def _message(message: Mapping[str, Any]) -> Message:
    role, content = message["role"], message.get("content")
    if content is None:
        content = message.get("refusal") or ""
    parsed: Message = {"role": _OLD_ROLES.get(role, role), "content": _text(content)}
    if calls := _calls(message):
        parsed["tool_calls"] = calls
    for name in ("reasoning_content", "reasoning", "thinking"):
        if message.get(name) is not None:
            # Templates of one family read the other name.
            parsed["reasoning_content"] = parsed["thinking"] = message[name]
            break
    others = {key: value for key, value in message.items() if value is not None}
    return {**parsed, **{key: value for key, value in others.items() if key not in _READ}}


def _text(content: str | list[Any]) -> str:
    """The text of a message: a string, or text parts joined as they stand."""
    if isinstance(content, str):
        return content
    return "".join(
        part if isinstance(part, str) else part["refusal" if part["type"] == "refusal" else "text"]
        for part in content
    )


def _calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The calls of a message; an empty list is what many clients write for none."""
    calls, old = message.get("tool_calls"), message.get("function_call")
    if calls is None and old is not None:
        calls = [{"function": old}]
    return [_call(call) for call in calls or ()]


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = _arguments(function.get("arguments"))
    parsed = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return parsed if call.get("id") is None else {"id": call["id"], **parsed}


def _arguments(arguments: Any) -> Any:
    """Arguments as an object. What a model once wrote wrongly is kept as text: the chat goes on."""
    if isinstance(arguments, dict):
        return arguments
    if not arguments:
        return {}
    if is_too_much(arguments.encode("utf-8", "replace")):
        return arguments
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    return value if isinstance(value, dict) and not is_deeper(value) else arguments


def fit(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    traits: TemplateTraits,
    family: ToolFamily,
) -> tuple[list[Message], dict[str, Any]]:
    """Messages and options of `ChatTemplate.render` with which the template shows all of them.

    Args:
        messages: as `parse_messages` gives them; they are left as they are.
        traits: of the template that renders a conversation with, or without, tools.
        family: how the model writes calls.
    """
    fitted = list(messages)
    options: dict[str, Any] = {}
    told = bool(tools) and traits.tools_in == "text"
    if told or not traits.calls:
        fitted = [_calls_in_words(message, family) for message in fitted]
    else:
        fitted = _shown_calls(fitted, traits)
    if told or not traits.results:
        fitted = _results_in_words(fitted)
    if told:
        fitted = _told(fitted, tools, family, system=traits.system)
    elif tools:
        fitted, options = place_tools(fitted, [tool.openai() for tool in tools], traits)
    if traits.parts:
        fitted = [{**m, "content": in_parts(m.get("content"))} for m in fitted]
    return fitted, options


def _told(
    messages: list[Message], tools: Sequence[Tool], family: ToolFamily, *, system: bool
) -> list[Message]:
    """The tools in the system message; in the first one where the template takes none such."""
    lines = "\n".join(json.dumps(tool.openai(), ensure_ascii=False) for tool in tools)
    call = family.written([("<function name>", "<object of arguments>")])
    instruction = _INSTRUCTION.format(tools=lines, call=call)
    first, *rest = messages
    if system and first["role"] != "system":
        return [{"role": "system", "content": instruction}, *messages]
    said = first.get("content") or ""
    told = [said, instruction] if system else [instruction, said]
    return [{**first, "content": "\n\n".join(told).strip()}, *rest]


def _calls_in_words(message: Message, family: ToolFamily) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    said = [message.get("content"), family.written(written)]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(text for text in said if text)}


def _results_in_words(messages: Iterable[Message]) -> list[Message]:
    """Results as the user's text; those of parallel calls in one message, since many templates
    want the roles to alternate."""
    found: list[Message] = []
    for are_results, run in groupby(messages, key=lambda message: message["role"] == "tool"):
        if not are_results:
            found += run
            continue
        texts = [
            f"<tool_response>\n{result.get('content') or ''}\n</tool_response>" for result in run
        ]
        found.append({"role": "user", "content": "\n".join(texts)})
    return found


def _shown_calls(messages: list[Message], traits: TemplateTraits) -> list[Message]:
    if traits.one_call:
        messages = _one_by_one(messages)
    shaped = [_shaped(message, traits) for message in messages]
    return _with_nine_character_ids(shaped) if traits.nine_character_ids else shaped


def _shaped(message: Message, traits: TemplateTraits) -> Message:
    """A message whose calls are of the form that the template takes."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    shaped = {**message, "tool_calls": [_shaped_call(call, traits) for call in calls]}
    if not message.get("content"):
        shaped["content"] = traits.empty_content
    return shaped


def _shaped_call(call: dict[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if traits.arguments_as_json and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str) and not traits.takes_odd_arguments:
        arguments = {"arguments": arguments}  # no object: the model broke off, or wrote it wrongly
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _one_by_one(messages: list[Message]) -> list[Message]:
    """Each of several calls in a message of its own, with its result behind it."""
    found: list[Message] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            found.append(message)
            continue
        results = []
        while position < len(messages) and messages[position]["role"] == "tool":
            results.append(messages[position])
            position += 1
        for index, call in enumerate(calls):
            said = message if index == 0 else {"role": "assistant", "content": ""}
            found.append({**said, "tool_calls": [call]})
            ids = (None, call.get("id"))
            own = next((one for one in results if one.get("tool_call_id") in ids), None)
            if own is not None:
                results.remove(own)
                found.append(own)
        found += results
    return found


def _with_nine_character_ids(messages: list[Message]) -> list[Message]:
    """Ids of nine letters and digits; results without one belong to the calls in their order."""
    found: list[Message] = []
    open_ids: list[str] = []  # of the latest calls, in order
    for number, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            open_ids = [_nine(call.get("id") or f"{number}.{i}") for i, call in enumerate(calls)]
            named = [{**call, "id": one} for call, one in zip(calls, open_ids, strict=True)]
            message = {**message, "tool_calls": named}
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            one = _nine(given) if given else open_ids[0] if open_ids else _nine(str(number))
            open_ids = [other for other in open_ids if other != one]
            message = {**message, "tool_call_id": one}
        found.append(message)
    return found


def _nine(call_id: str) -> str:
    """The id itself where it is one, also behind another protocol's prefix; else made from it."""
    own = call_id.rpartition("_")[2]
    if is_mistral_call_id(own):
        return own
    number = int.from_bytes(hashlib.sha256(call_id.encode()).digest()[:8])
    base = len(CALL_ID_CHARACTERS)
    return "".join(CALL_ID_CHARACTERS[number // base**place % base] for place in range(9))
