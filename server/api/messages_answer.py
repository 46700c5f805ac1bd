"""Messages and events, and errors, in Anthropic's form, from a generation. No HTTP here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from server.api.answers import StreamForm
from server.api.block_answer import BlockAnswer
from server.api.fields.caching import TTL_S
from server.http.sse import event
from server.text.json_bounds import is_deeper

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from server.formats.events import Event
    from server.formats.model_format import AnswerParser
    from server.generation.generator import Generation
    from server.generation.output import Delta
    from server.http.errors import ErrorAnswer
    from server.service import Service

Block = dict[str, Any]


class AnthropicAnswer(BlockAnswer):
    """A message."""

    text_block = "text"
    reasoning_block = "thinking"

    def __init__(
        self, generation: Generation, service: Service, new_parser: Callable[[], AnswerParser]
    ) -> None:
        super().__init__(generation, service, new_parser)
        self._content: list[Block] = []
        self._open = False  # the last block is being written
        self._input: list[str] = []  # of the tool use that is being written
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def ending(self) -> bytes:
        ended = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        out = _event("message_delta", delta=ended, usage=self._usage(), **self.timings())
        return out + _event("message_stop")

    def failure(self, error: ErrorAnswer) -> bytes:
        return _refusal(error)

    def so_far(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": list(self._content),
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": self._usage(),
            **(self.timings() if self._stop_reason else {}),
        }

    def _usage(self) -> dict[str, Any]:
        """Anthropic counts prompt tokens that were cached, or are from now on, apart from the
        others."""
        usage = self.generation.usage()
        written = usage.kept_tokens
        hour = usage.written_tokens.get(TTL_S["1h"], 0)
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens - written,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": written,
            "cache_creation": {
                "ephemeral_5m_input_tokens": written - hour,
                "ephemeral_1h_input_tokens": hour,
            },
            "output_tokens": usage.completion_tokens,
            **usage.waited(),
        }

    def opening(self) -> bytes:
        return _event("message_start", message=self.so_far())

    def note(self, delta: Delta, parts: Sequence[Event]) -> None:
        if delta.finish is not None:
            self._stop(delta.finish.reason.value, delta.finish.matched)

    def _stop(self, reason: str, matched: int | str | None) -> None:
        if reason == "length":
            self._stop_reason = "max_tokens"
        elif reason == "abort":
            self._stop_reason = "pause_turn"  # what is not finished may be gone on from
        elif self.parser.called_tools:
            self._stop_reason = "tool_use"
        elif isinstance(matched, str):
            self._stop_reason, self._stop_sequence = "stop_sequence", matched
        else:
            self._stop_reason = "end_turn"

    def _open_block(self, block: Block) -> bytes:
        out = self.close_block()
        self._content.append(block)
        self._open = True
        index = len(self._content) - 1
        return out + _event("content_block_start", index=index, content_block=block)

    def _delta(self, **fields: Any) -> bytes:
        return _event("content_block_delta", index=len(self._content) - 1, delta=fields)

    def more_text(self, kind: str, text: str) -> bytes:
        out = b""
        if not self._open or self._content[-1]["type"] != kind:
            more = {"signature": ""} if kind == "thinking" else {}
            out = self._open_block({"type": kind, kind: "", **more})
        self._content[-1][kind] += text
        return out + self._delta(type=f"{kind}_delta", **{kind: text})

    def new_call(self, call_id: str, name: str) -> bytes:
        used = "toolu_" + call_id.removeprefix("call_")
        out = self._open_block({"type": "tool_use", "id": used, "name": name, "input": {}})
        self._input = []
        return out

    def more_arguments(self, text: str) -> bytes:
        self._input.append(text)
        return self._delta(type="input_json_delta", partial_json=text)

    def close_block(self) -> bytes:
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
    return value if isinstance(value, dict) and not is_deeper(value) else {}


_ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: ErrorAnswer) -> dict[str, Any]:
    """An error's body as Anthropic's clients read it."""
    kind = _ERROR_TYPES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.body["error"]["message"]}}


def _refusal(error: ErrorAnswer) -> bytes:
    return event(anthropic_error(error), "error")


ANTHROPIC = StreamForm(refusal=_refusal, keep_alive=_event("ping"))
