"""A model's text as parts of a message: reasoning, content, tool calls, in the order they come.

The parts are `delta` objects of the chat API; the other endpoints translate these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from server.formats.tool_parser import CallArguments, CallStart, Event, TextPiece

if TYPE_CHECKING:
    from server.formats.reasoning import ReasoningParser
    from server.formats.tool_parser import ToolCallParser


class MessageParser(Protocol):
    """Splits the text of one chat choice into the parts of a message.

    What it gives are `delta` objects of the chat API; whole messages are joined from them.
    """

    def feed(self, text: str) -> list[dict[str, Any]]: ...

    def finish(self) -> list[dict[str, Any]]:
        """What was held back, at the end of the text."""
        ...

    @property
    def called_tools(self) -> bool:
        """Whether the choice ends because it calls tools."""
        ...


class PlainContent:
    """All text is content."""

    called_tools = False

    def feed(self, text: str) -> list[dict[str, Any]]:
        return [{"content": text}] if text else []

    def finish(self) -> list[dict[str, Any]]:
        return []


class AnswerParser:
    """One choice's text. Args: None: the text holds no such thing."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolCallParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def called_tools(self) -> bool:
        """Whether a tool was called so far."""
        return self._tools is not None and self._tools.calls > 0

    def feed(self, text: str) -> list[dict[str, Any]]:
        """The deltas that this text completes."""
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.feed(text)
        return self._deltas(reasoning, text)

    def finish(self) -> list[dict[str, Any]]:
        """What was held back, at the end of the text."""
        reasoning = text = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.finish()
        deltas = self._deltas(reasoning, text)
        if self._tools is not None:
            deltas += map(chat_delta, self._tools.finish())
        return deltas

    def _deltas(self, reasoning: str, text: str) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if reasoning:
            deltas.append({"reasoning_content": reasoning})
        if self._tools is not None:
            deltas += map(chat_delta, self._tools.feed(text))
        elif text:
            deltas.append({"content": text})
        return deltas


def chat_delta(event: Event) -> dict[str, Any]:
    """An event of a tool parser as a `delta` of the chat API."""
    match event:
        case TextPiece(text):
            return {"content": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
