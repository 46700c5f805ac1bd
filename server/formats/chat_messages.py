"""The `messages` of a chat request, checked and brought into the form that templates expect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from runtime.errors import InvalidRequest, wrong

if TYPE_CHECKING:
    from server.text.chat_template import Message

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def parse_messages(value: Any) -> list[Message]:
    """Messages as templates take them: content a string, tool-call arguments objects.

    Raises: InvalidRequest: naming the message that is wrong.
    """
    if not isinstance(value, list) or not value:
        raise wrong("messages", value, "a list of at least one message")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise wrong(where, message, "an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise wrong(f"{where}.role", role, "one of " + ", ".join(ROLES))
    calls = message.get("tool_calls")
    if message.get("content") is None and not (role == "assistant" and _speaks(message)):
        raise wrong(f"{where}.content", None, "a string or a list of text parts")
    # "developer" is the newer name of "system"; templates know the old one.
    parsed: Message = {
        "role": "system" if role == "developer" else role,
        "content": _content(message.get("content"), f"{where}.content"),
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(name), str):
            parsed[name] = message[name]
    if calls is not None:
        parsed["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    return parsed


def _speaks(message: dict[str, Any]) -> bool:
    """An assistant message may do without content when it calls tools, thinks or refuses."""
    return any(
        message.get(name)
        for name in ("tool_calls", "function_call", "reasoning_content", "refusal")
    )


def _content(content: Any, where: str) -> str:
    """The text of a message: a string, or text parts joined as they stand."""
    if content is None:
        return ""
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


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise wrong(where, calls, "a list of tool calls")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(where, call, "an object with a function that has a name")
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {
            "name": function["name"],
            "arguments": _arguments(function.get("arguments"), f"{where}.function.arguments"),
        },
    }


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
