"""What the bodies and events of the two OpenAI endpoints have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from server.http.sse import DONE, event

if TYPE_CHECKING:
    from runtime.request import Finish
    from server.generation.generator import Generation, Usage


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that every body and event of one answer begins with."""

    id: str
    object: str
    created: int
    model: str

    def body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }

    def closing(self, generation: Generation) -> bytes:
        """The events that end a stream."""
        if not generation.params.include_usage:
            return DONE
        return event(self.body([], usage=usage_body(generation.usage()))) + DONE


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **usage.waited(),
    }


def finish_name(finish: Finish | None, called_tools: bool = False) -> str | None:
    if finish is None:
        return None
    return "tool_calls" if called_tools and finish.reason.value == "stop" else finish.reason.value
