"""/v1/messages in Anthropic's form: bodies to chat requests, chat deltas to messages and events.

No HTTP here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from runtime.errors import InvalidRequest, wrong
from server.api.body_fields import BodyFields
from server.http.sse import event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from server.formats.answer_parser import MessageParser
    from server.generation.generator import Generation
    from server.generation.streams import Delta
    from server.http.errors import ErrorAnswer

Block = dict[str, Any]

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


class AnthropicAnswer:
    """A message, streamed or whole; the whole one is what the stream amounts to."""

    def __init__(
        self,
        message_id: str,
        model: str,
        generation: Generation,
        new_parser: Callable[[], MessageParser],
    ) -> None:
        self._id = message_id
        self._model = model
        self._generation = generation
        self._parser = new_parser()
        self._content: list[Block] = []
        self._open = False  # the last block is being written
        self._input: list[str] = []  # of the tool use that is being written
        self._begun = False
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def events(self, delta: Delta) -> bytes:
        """The bytes of the events that a delta makes."""
        out = b"" if self._begun else self._opening()
        parts = self._parser.feed(delta.text)
        if delta.finish is not None:
            parts += self._parser.finish()
        for part in parts:
            if text := part.get("reasoning_content"):
                out += self._text("thinking", text)
            if text := part.get("content"):
                out += self._text("text", text)
            for call in part.get("tool_calls", ()):
                out += self._call(call)
        if delta.finish is not None:
            self._stop(delta.finish.reason.value, delta.finish.matched)
        return out

    def closing(self) -> bytes:
        """The events that end the stream."""
        out = b"" if self._begun else self._opening()
        out += self._close_block()
        ended = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        out += _event("message_delta", delta=ended, usage=self._usage())
        return out + _event("message_stop")

    def failure(self, error: ErrorAnswer) -> bytes:
        """The event that ends a stream which cannot go on."""
        return event(anthropic_error(error), "error")

    async def whole(self) -> dict[str, Any]:
        """The message, once the generation has ended."""
        async for delta in self._generation:
            self.events(delta)
        self.closing()
        return self._message()

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._content),
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        """Anthropic counts cached prompt tokens apart from the others."""
        usage = self._generation.usage()
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion_tokens,
        }

    def _opening(self) -> bytes:
        self._begun = True
        return _event("message_start", message=self._message())

    def _stop(self, reason: str, matched: int | str | None) -> None:
        if reason == "length":
            self._stop_reason = "max_tokens"
        elif self._parser.called_tools:
            self._stop_reason = "tool_use"
        elif isinstance(matched, str):
            self._stop_reason, self._stop_sequence = "stop_sequence", matched
        else:
            self._stop_reason = "end_turn"

    def _open_block(self, block: Block) -> bytes:
        out = self._close_block()
        self._content.append(block)
        self._open = True
        index = len(self._content) - 1
        return out + _event("content_block_start", index=index, content_block=block)

    def _delta(self, **fields: Any) -> bytes:
        return _event("content_block_delta", index=len(self._content) - 1, delta=fields)

    def _text(self, kind: str, text: str) -> bytes:
        out = b""
        if not self._open or self._content[-1]["type"] != kind:
            more = {"signature": ""} if kind == "thinking" else {}
            out = self._open_block({"type": kind, kind: "", **more})
        self._content[-1][kind] += text
        return out + self._delta(type=f"{kind}_delta", **{kind: text})

    def _call(self, call: dict[str, Any]) -> bytes:
        out = b""
        function = call["function"]
        if "id" in call:
            call_id = "toolu_" + call["id"].removeprefix("call_")
            block = {"type": "tool_use", "id": call_id, "name": function["name"], "input": {}}
            out = self._open_block(block)
            self._input = []
        if text := function.get("arguments"):
            self._input.append(text)
            out += self._delta(type="input_json_delta", partial_json=text)
        return out

    def _close_block(self) -> bytes:
        if not self._open:
            return b""
        block = self._content[-1]
        if block["type"] == "tool_use":
            block["input"] = _object("".join(self._input))
        self._open = False
        return _event("content_block_stop", index=len(self._content) - 1)


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _object(text: str) -> dict[str, Any]:
    """The arguments of a call; empty where the model wrote no whole object."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


_ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: ErrorAnswer) -> dict[str, Any]:
    """An error's body as Anthropic's clients read it."""
    kind = _ERROR_TYPES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.body["error"]["message"]}}
