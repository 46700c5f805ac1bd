"""The `messages` of a chat request, checked and brought into the form that templates expect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from runtime.errors import InvalidRequest, wrong

if TYPE_CHECKING:
    from server.text.chat_template import Message

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# The newer names mean the same; templates know the old ones.
_OLD_ROLES = {"developer": "system", "function": "tool"}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def parse_messages(value: Any) -> list[Message]:
    """Messages as templates take them: content a string, tool-call arguments objects.

    Raises: InvalidRequest: naming the message that is wrong.
    """
    if not isinstance(value, list) or not value:
        raise wrong("messages", value, "a list of at least one message")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(value)]


# Fields that are read here; all others go to the template as they are, except nulls.
_READ = frozenset(
    {"role", "content", "refusal", "function_call", "tool_calls"}
    | {"reasoning_content", "reasoning", "thinking"}
)


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise wrong(where, message, "an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise wrong(f"{where}.role", role, "one of " + ", ".join(ROLES))
    calls = _calls(message, where)
    reasoning = _reasoning(message, where)
    content = message.get("content")
    if content is None and role == "assistant":
        content = message.get("refusal")
        if content is None and (calls or reasoning):
            content = ""
    if content is None:
        raise wrong(f"{where}.content", None, "a string or a list of text parts")
    parsed: Message = {"role": _OLD_ROLES.get(role, role)}
    parsed["content"] = _content(content, f"{where}.content")
    if calls:
        parsed["tool_calls"] = calls
    if reasoning is not None:
        # Templates of one family read the other name.
        parsed["reasoning_content"] = parsed["thinking"] = reasoning
    others = {key: value for key, value in message.items() if value is not None}
    return {**parsed, **{key: value for key, value in others.items() if key not in _READ}}


def _reasoning(message: dict[str, Any], where: str) -> str | None:
    """What the assistant thought, under any of its names."""
    for name in ("reasoning_content", "thinking", "reasoning"):
        if (value := message.get(name)) is not None:
            if not isinstance(value, str):
                raise wrong(f"{where}.{name}", value, "a string")
            return value
    return None


def _calls(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The calls of a message; an empty list is what many clients write for none."""
    calls, old = message.get("tool_calls"), message.get("function_call")
    if calls is None and old is not None:
        return [_tool_call({"function": old}, f"{where}.function_call")]
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise wrong(f"{where}.tool_calls", calls, "a list of tool calls")
    return [_tool_call(one, f"{where}.tool_calls[{i}]") for i, one in enumerate(calls)]


def _content(content: Any, where: str) -> str:
    """The text of a message: a string, or text parts joined as they stand."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, content, "a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            raise InvalidRequest(
                f"{where}[{index}]: parts of type {kind!r} are not supported by this model; only"
                " text parts are",
                param=where,
            )
        text = part.get(_TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise wrong(f"{where}[{index}].{_TEXT_PARTS[kind]}", text, "a string")
        texts.append(text)
    return "".join(texts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(where, call, "an object with a function that has a name")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    parsed = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    call_id = call.get("id")
    if not isinstance(call_id, str | None):
        raise wrong(f"{where}.id", call_id, "a string")
    return parsed if call_id is None else {"id": call_id, **parsed}


def _arguments(arguments: Any, where: str) -> Any:
    """Arguments as an object. What a model once wrote wrongly is kept as text: the chat goes on."""
    if isinstance(arguments, dict):
        return arguments
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        raise wrong(where, arguments, "a string of JSON")
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    return value if isinstance(value, dict) else arguments
