"""The server that is asked, and the two protocols it may be asked in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from server.bench.answer import Answer

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
# A text, or (role, text) of each message so far.
Prompt = str | Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Target:
    """The server and how it is asked.

    Args:
        base_url: with or without a closing /v1.
        endpoint: "completions" or "chat".
        ignore_eos: ask for answers of their full length, whatever the model says.
        extra: merged into each request body.
        keep_alive: reuse connections. Off by default: some servers close one after each stream,
            and the next request on it would fail.
    """

    base_url: str
    model: str
    endpoint: str = "completions"
    extra: dict[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    timeout_s: float = 600.0
    keep_alive: bool = False
    ignore_eos: bool = False

    def url(self, path: str) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1") + path

    @property
    def ask_url(self) -> str:
        return self.url(PATHS[self.endpoint])

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "stream": True, "max_tokens": max_tokens}
        body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        messages = [("user", prompt)] if isinstance(prompt, str) else prompt
        if self.endpoint == "chat":
            body["messages"] = [{"role": role, "content": text} for role, text in messages]
        else:
            body["prompt"] = "\n".join(text for _, text in messages)
        return body | self.extra


class StreamError(ValueError):
    """The server has told of an error in its stream."""


def take_event(event: dict[str, Any], answer: Answer) -> bool:
    """Notes what an event says; true where it stands for a token.

    Raises: StreamError: it tells of an error.
    """
    if event.get("error"):
        raise StreamError(json.dumps(event["error"]))
    usage = event.get("usage")
    if usage:
        answer.prompt_tokens = usage.get("prompt_tokens") or 0
        answer.completion_tokens = usage.get("completion_tokens") or 0
        details = usage.get("prompt_tokens_details") or {}
        answer.cached_tokens = details.get("cached_tokens")
    is_token = False
    for choice in event.get("choices") or []:
        reason = choice.get("finish_reason")
        delta = choice.get("delta")
        if delta is None:  # an empty text before the end is a token that shows no text
            text = choice.get("text")
            is_token |= bool(text) or not reason
        else:
            text = delta.get("content")
            hidden = ("reasoning_content", "reasoning", "tool_calls")
            is_token |= bool(text) or any(delta.get(name) for name in hidden)
        if text:
            answer.pieces.append(text)
        answer.finish_reason = reason or answer.finish_reason
    return is_token
