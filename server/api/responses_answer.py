"""Response objects and events of /v1/responses, from a generation. No HTTP here."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from server.api.answers import StreamForm
from server.api.block_answer import BlockAnswer
from server.formats.events import Reasoning
from server.http.sse import event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from server.formats.events import Event
    from server.formats.model_format import AnswerParser
    from server.generation.generator import Generation
    from server.generation.output import Delta
    from server.http.errors import ErrorAnswer
    from server.service import Service

Item = dict[str, Any]


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


@dataclass(slots=True)
class _Open:
    """The output item that is being written."""

    item: Item
    text: list[str] = field(default_factory=list)


class ResponseAnswer(BlockAnswer):
    """A response. Args: request: the body that it answers, parts of which it repeats."""

    text_block = "message"
    reasoning_block = "reasoning"

    def __init__(
        self,
        generation: Generation,
        service: Service,
        new_parser: Callable[[], AnswerParser],
        request: Mapping[str, Any],
    ) -> None:
        super().__init__(generation, service, new_parser)
        self._base = {"id": self.id, **_echoed(request, self.created, self.model)}
        self._output: list[Item] = []
        self._open: _Open | None = None
        self._events = 0
        self._reasoning_tokens = 0
        self._reasoned = self._answering = False
        self._status = "in_progress"
        self._incomplete: dict[str, str | None] | None = None  # why, of an unfinished answer

    def note(self, delta: Delta, parts: Sequence[Event]) -> None:
        if delta.finish is not None:
            self._incomplete = _INCOMPLETE.get(delta.finish.reason.value)
        self._count_reasoning(parts, len(delta.token_ids))

    def _count_reasoning(self, parts: Sequence[Event], tokens: int) -> None:
        """Tokens up to the answer are the reasoning's, its marks included, where there is any."""
        thought = any(isinstance(part, Reasoning) for part in parts)
        self._reasoned |= thought
        self._answering |= bool(parts) and not thought
        if not self._answering:
            self._reasoning_tokens += tokens

    def ending(self) -> bytes:
        self._status = "incomplete" if self._incomplete else "completed"
        return self._event(f"response.{self._status}", response=self.so_far())

    def progress(self, told: dict[str, Any]) -> bytes:
        begun = self.beginning()
        return begun + self._event("response.in_progress", response=self.so_far(), progress=told)

    def failure(self, error: ErrorAnswer) -> bytes:
        if not self._output and self._open is None:
            return _refusal(error, self._events)
        self._status = "failed"
        told = error.body["error"]
        failed = {"code": "server_error", "message": told["message"]}
        return self._event("response.failed", response={**self.so_far(), "error": failed})

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return event(data, kind)

    def opening(self) -> bytes:
        return self._event("response.created", response=self.so_far()) + self._event(
            "response.in_progress", response=self.so_far()
        )

    def _at(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open.item["id"], "output_index": len(self._output)}

    def _open_item(self, item: Item) -> bytes:
        out = self.close_block()
        self._open = _Open(item)
        shown = {**item, "content": []} if "content" in item else item
        return out + self._event(
            "response.output_item.added", output_index=len(self._output), item=shown
        )

    def more_text(self, kind: str, text: str) -> bytes:
        out = b""
        if self._open is None or self._open.item["type"] != kind:
            if kind == "message":
                item: Item = {"type": kind, "id": _id("msg"), "role": "assistant"}
            else:
                item = {"type": kind, "id": _id("rs"), "summary": []}
            out = self._open_item({**item, "status": "in_progress", "content": [_part(kind, "")]})
            out += self._event(
                "response.content_part.added", **self._at(), content_index=0, part=_part(kind, "")
            )
        assert self._open is not None
        self._open.text.append(text)
        more: Item = {"logprobs": []} if kind == "message" else {}
        return out + self._event(
            f"response.{_STREAM_NAME[kind]}.delta",
            **self._at(),
            content_index=0,
            delta=text,
            **more,
        )

    def new_call(self, call_id: str, name: str) -> bytes:
        item = {"type": "function_call", "id": _id("fc"), "call_id": call_id}
        return self._open_item(item | {"name": name, "arguments": "", "status": "in_progress"})

    def more_arguments(self, text: str) -> bytes:
        assert self._open is not None
        self._open.text.append(text)
        return self._event("response.function_call_arguments.delta", **self._at(), delta=text)

    def close_block(self) -> bytes:
        if self._open is None:
            return b""
        item, text = self._open.item, "".join(self._open.text)
        kind = item["type"]
        if kind == "function_call":
            item["arguments"] = text
            out = self._event(
                "response.function_call_arguments.done",
                **self._at(),
                name=item["name"],
                arguments=text,
            )
        else:
            part = _part(kind, text)
            item["content"] = [part]
            more: Item = {"logprobs": []} if kind == "message" else {}
            at = {**self._at(), "content_index": 0}
            out = self._event(f"response.{_STREAM_NAME[kind]}.done", **at, text=text, **more)
            out += self._event("response.content_part.done", **at, part=part)
        item["status"] = "incomplete" if self._incomplete else "completed"
        out += self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = None
        return out

    def so_far(self) -> dict[str, Any]:
        done = self._status not in ("in_progress", "failed")
        return {
            **self._base,
            "status": self._status,
            "incomplete_details": self._incomplete if self._status == "incomplete" else None,
            "output": list(self._output),
            "usage": self._usage() if done else None,
            **(self.timings() if done else {}),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.generation.usage()
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": usage.kept_tokens,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": self._reasoning_tokens if self._reasoned else 0
            },
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            **usage.waited(),
        }


def _refusal(error: ErrorAnswer, sequence_number: int = 0) -> bytes:
    """The event of an error before anything was said. OpenAI's documentation has its parts in the
    event, their clients read them, and raise them, under "error"."""
    told = error.body["error"]
    parts = {name: told[name] for name in ("code", "message", "param")}
    data = {"type": "error", "sequence_number": sequence_number, **parts, "error": told}
    return event(data, "error")


RESPONSES = StreamForm(refusal=_refusal)

# Nobody has a name for an answer that was aborted; it is incomplete all the same.
_INCOMPLETE: dict[str, dict[str, str | None]] = {
    "length": {"reason": "max_output_tokens"},
    "abort": {"reason": None},
}
_STREAM_NAME = {"message": "output_text", "reasoning": "reasoning_text"}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _echoed(body: Mapping[str, Any], created: int, model: str) -> dict[str, Any]:
    """What the response repeats of its request."""
    text = body.get("text") or {}
    reasoning = body.get("reasoning") or {}
    choice = body.get("tool_choice")
    return {
        "object": "response",
        "created_at": created,
        "model": model,
        "error": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": False,
        "temperature": 1.0 if body.get("temperature") is None else body["temperature"],
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": "auto" if choice is None else choice,
        "tools": body.get("tools") or [],
        "top_p": 1.0 if body.get("top_p") is None else body["top_p"],
        "truncation": "disabled",
        "user": body.get("user"),
    }
