"""/v1/responses: its body to a chat request. Nothing is stored: a conversation is sent whole."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from runtime.errors import InvalidRequest, wrong
from server.api.body_fields import BodyFields
from server.api.chat import plan_chat
from server.api.delivery import send
from server.api.responses_answer import ResponseAnswer
from server.service import REQUEST_ID, SERVICE, new_id, read_json

Item = dict[str, Any]

# Fields that mean the same on both endpoints are handed on as they are.
_SAME = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stream",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "ignore_eos",
    "min_tokens",
    "priority",
    "cache_salt",
    "timeout",
)
_UNSERVED = ("previous_response_id", "conversation", "prompt")


async def responses(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses."""
    service = request.app[SERVICE]
    body = await read_json(request)
    plan = await plan_chat(chat_body(body), service)
    response_id = new_id("resp")
    with service.generator.start(
        [plan.prompt_ids], plan.params, response_id, request[REQUEST_ID]
    ) as generation:
        answer = ResponseAnswer(
            response_id,
            body,
            int(time.time()),
            service.limits.model,
            generation,
            plan.new_parser,
        )
        return await send(request, generation, answer)


def chat_body(body: Any) -> dict[str, Any]:
    """The chat request that a /v1/responses request amounts to.

    Raises: InvalidRequest: naming the field that is wrong or not served.
    """
    fields = BodyFields(body)
    for name in _UNSERVED:
        if fields.get(name) is not None:
            raise InvalidRequest(
                f"{name}: responses are not stored here; send the whole conversation as input",
                param=name,
            )
    if fields.boolean("background"):
        raise InvalidRequest("background: is not served; leave it out", param="background")
    messages = _messages(fields.get("input"))
    instructions = fields.string("instructions")
    if instructions is not None:
        messages.insert(0, {"role": "system", "content": instructions})
    chat: dict[str, Any] = {name: body[name] for name in _SAME if body.get(name) is not None}
    chat["messages"] = messages
    chat["max_completion_tokens"] = fields.integer("max_output_tokens", low=1)
    if fields.get("tools") is not None:
        chat["tools"] = [_tool(tool, index) for index, tool in enumerate(_list(fields, "tools"))]
    if fields.get("tool_choice") is not None:
        chat["tool_choice"] = fields.get("tool_choice")
    if (text := fields.get("text")) is not None:
        chat["response_format"] = _text_format(BodyFields(text, "text").get("format"))
    for name in ("metadata", "reasoning"):  # repeated in the response, so they must fit there
        BodyFields(fields.get(name) or {}, name)
    fields.string("user")
    return chat


def _list(fields: BodyFields, name: str) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise fields.error(name, "a list")
    return value


def _messages(given: Any) -> list[dict[str, Any]]:
    """Chat messages of `input`. Reasoning and function calls join the assistant's message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise wrong("input", given, "a string or a list of at least one item")
    messages: list[dict[str, Any]] = []
    thought = ""  # reasoning that waits for its assistant's message
    for index, item in enumerate(given):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise wrong(where, item, "an object")
        kind = item.get("type") or "message"
        if kind == "reasoning":
            thought = _reasoning_text(item)
        elif kind == "message":
            message = {"role": item.get("role"), "content": item.get("content")}
            if thought and message["role"] == "assistant":
                message["reasoning_content"], thought = thought, ""
            messages.append(message)
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            if thought:
                messages[-1]["reasoning_content"], thought = thought, ""
            messages[-1].setdefault("tool_calls", []).append(_call(item))
        elif kind == "function_call_output":
            messages.append(_call_output(item, where))
        else:
            allowed = "message, function_call, function_call_output or reasoning"
            raise wrong(f"{where}.type", kind, allowed)
    if not messages:
        raise wrong("input", given, "a list with at least one message")
    return messages


def _call(item: Item) -> dict[str, Any]:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _call_output(item: Item, where: str) -> dict[str, Any]:
    output = item.get("output")
    if not isinstance(output, str | list):
        raise wrong(f"{where}.output", output, "a string or a list of text parts")
    return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}


def _reasoning_text(item: Item) -> str:
    parts = item.get("content")
    texts = [p.get("text") for p in parts if isinstance(p, dict)] if isinstance(parts, list) else []
    return "".join(text for text in texts if isinstance(text, str))


def _tool(tool: Any, index: int) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise InvalidRequest(
            f"tools[{index}].type: got {kind!r}; only function tools are served",
            param=f"tools[{index}].type",
        )
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _text_format(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    if isinstance(given, dict) and given.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": given.get("schema")}}
    return given  # type: ignore[no-any-return]  # checked with the chat request


ROUTES = [web.post("/v1/responses", responses)]
