"""/v1/messages, in Anthropic's form: its body to a chat request."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from runtime.errors import InvalidRequest, wrong
from server.api.body_fields import BodyFields
from server.api.chat import plan_chat
from server.api.delivery import send
from server.api.messages_answer import AnthropicAnswer
from server.service import REQUEST_ID, SERVICE, json_response, new_id, read_json

_SAME = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "stream",
    "seed",
    "min_p",
    "priority",
    "cache_salt",
    "chat_template_kwargs",
)
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


async def messages(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages."""
    service = request.app[SERVICE]
    plan = await plan_chat(chat_body(await read_json(request)), service)
    message_id = new_id("msg")
    with service.generator.start(
        [plan.prompt_ids], plan.params, message_id, request[REQUEST_ID]
    ) as generation:
        answer = AnthropicAnswer(message_id, service.limits.model, generation, plan.new_parser)
        return await send(request, generation, answer)


async def count_tokens(request: web.Request) -> web.Response:
    """POST /v1/messages/count_tokens: the tokens of the prompt that /v1/messages would make."""
    body = chat_body(await read_json(request), counting=True)
    plan = await plan_chat(body, request.app[SERVICE])
    return json_response({"input_tokens": len(plan.prompt_ids)})


def chat_body(body: Any, *, counting: bool = False) -> dict[str, Any]:
    """The chat request that a /v1/messages request amounts to.

    Args: counting: for count_tokens, which takes no max_tokens.
    Raises: InvalidRequest: naming the field that is wrong or not served.
    """
    fields = BodyFields(body)
    chat: dict[str, Any] = {name: body[name] for name in _SAME if body.get(name) is not None}
    if not counting:
        chat["max_tokens"] = fields.integer("max_tokens", low=1)
        if chat["max_tokens"] is None:
            raise fields.error("max_tokens", "an integer of at least 1")
    if (stops := fields.get("stop_sequences")) is not None:
        if not isinstance(stops, list):
            raise fields.error("stop_sequences", "a list of strings")
        chat["stop"] = stops
    chat["messages"] = _messages(fields)
    # An assistant's message at the end is a beginning that the model goes on from.
    if chat["messages"][-1]["role"] == "assistant" and "tool_calls" not in chat["messages"][-1]:
        chat["continue_final_message"] = True
    _add_tools(chat, fields)
    if (thinking := fields.get("thinking")) is not None:
        kind = BodyFields(thinking, "thinking").string("type")
        kwargs = chat.get("chat_template_kwargs") or {}
        if isinstance(kwargs, dict):
            chat["chat_template_kwargs"] = {"enable_thinking": kind != "disabled", **kwargs}
    return chat


def _messages(fields: BodyFields) -> list[dict[str, Any]]:
    given = fields.get("messages")
    if not isinstance(given, list) or not given:
        raise fields.error("messages", "a list of at least one message")
    messages: list[dict[str, Any]] = []
    if (system := fields.get("system")) is not None:
        messages.append({"role": "system", "content": _text(system, "system")})
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            raise wrong(f"{where}.role", role, "user or assistant")
        content = message.get("content")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif not isinstance(content, list):
            raise wrong(f"{where}.content", content, "a string or a list of blocks")
        elif role == "assistant":
            messages.append(_assistant(content, f"{where}.content"))
        else:
            messages += _user(content, role, f"{where}.content")
    return messages


def _user(blocks: list[Any], role: str, where: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own; the text follows them."""
    found: list[dict[str, Any]] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(_text([block], at))
        elif kind == "tool_result":
            result = _text(block.get("content") or "", f"{at}.content")
            found.append(
                {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
            )
        else:
            raise _unserved(kind, at, "text and tool_result")
    if texts or not found:
        found.append({"role": role, "content": "".join(texts)})
    return found


def _assistant(blocks: list[Any], where: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            message["content"] += _text([block], at)
        elif kind == "thinking":
            thought = block.get("thinking")
            if not isinstance(thought, str):
                raise wrong(f"{at}.thinking", thought, "a string")
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            call = {"id": block.get("id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif kind != "redacted_thinking":
            raise _unserved(kind, at, "text, thinking and tool_use")
    return message


def _text(content: Any, where: str) -> str:
    """A string, or text blocks joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, content, "a string or a list of text blocks")
    texts = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text":
            raise _unserved(kind, where, "text")
        if not isinstance(block.get("text"), str):
            raise wrong(f"{where}.text", block.get("text"), "a string")
        texts.append(block["text"])
    return "".join(texts)


def _unserved(kind: Any, where: str, served: str) -> InvalidRequest:
    return InvalidRequest(
        f"{where}: blocks of type {kind!r} are not supported here; only {served} are", param=where
    )


def _add_tools(chat: dict[str, Any], fields: BodyFields) -> None:
    if (tools := fields.get("tools")) is not None:
        if not isinstance(tools, list):
            raise fields.error("tools", "a list")
        chat["tools"] = [_tool(tool, index) for index, tool in enumerate(tools)]
    if (given := fields.get("tool_choice")) is None:
        return
    choice = BodyFields(given, "tool_choice")
    kind = choice.string("type")
    if kind == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.string("name")}}
    elif kind in _TOOL_CHOICES:
        chat["tool_choice"] = _TOOL_CHOICES[kind]
    else:
        raise choice.error("type", "auto, any, tool or none")
    if choice.boolean("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False


def _tool(tool: Any, index: int) -> dict[str, Any]:
    where = f"tools[{index}]"
    if not isinstance(tool, dict):
        raise wrong(where, tool, "an object with name and input_schema")
    if tool.get("type", "custom") != "custom":
        raise InvalidRequest(
            f"{where}.type: got {tool['type']!r}; tools that the server runs itself are not served",
            param=f"{where}.type",
        )
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
        "strict": tool.get("strict"),
    }
    return {"type": "function", "function": function}


ROUTES = [
    web.post("/v1/messages", messages),
    web.post("/v1/messages/count_tokens", count_tokens),
]
