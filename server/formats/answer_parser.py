"""A model's text as an answer: reasoning, text and tool calls, in the order they come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.formats.events import Reasoning, Text

if TYPE_CHECKING:
    from server.formats.events import Event
    from server.formats.reasoning import ReasoningParser
    from server.formats.tool_parser import ToolCallParser


class AnswerParser:
    """Reads one choice's text, in pieces of any size.

    Args: reasoning, tools: None where the text holds no such thing.
    Attributes: plain: all text is said to the reader, as it comes.
    """

    def __init__(
        self, reasoning: ReasoningParser | None = None, tools: ToolCallParser | None = None
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self.plain = reasoning is None and tools is None

    @property
    def called_tools(self) -> bool:
        """Whether a tool was called so far."""
        return self._tools is not None and self._tools.calls > 0

    def read(self, text: str, *, ended: bool) -> list[Event]:
        """The events that this text completes; with the end also what was held back."""
        events = self._events(*self._reasoning.feed(text)) if self._reasoning else self._said(text)
        if not ended:
            return events
        if self._reasoning is not None:
            events += self._events(*self._reasoning.finish())
        if self._tools is not None:
            events += self._tools.finish()
        return events

    def _events(self, reasoning: str, text: str) -> list[Event]:
        said = self._said(text)
        return [Reasoning(reasoning), *said] if reasoning else said

    def _said(self, text: str) -> list[Event]:
        if self._tools is not None:
            return self._tools.feed(text)
        return [Text(text)] if text else []
