"""Messages as chat templates expect them, from messages in OpenAI's form.

What a message may hold is declared in server.api; here it is right by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from server.text.json_depth import is_deeper

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from server.text.chat_template import Message

# The newer names mean the same; templates know the old ones.
_OLD_ROLES = {"developer": "system", "function": "tool"}
# Fields that are read here; all others go to the template as they are, except nulls.
_READ = frozenset(
    {"role", "content", "refusal", "function_call", "tool_calls"}
    | {"reasoning_content", "reasoning", "thinking"}
)


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
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    return value if isinstance(value, dict) and not is_deeper(value) else arguments
