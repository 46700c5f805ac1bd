"""Answers that are a list of blocks, of which the last one is being written.

OpenAI's responses and Anthropic's messages are such. The whole answer is what the stream amounts
to.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from server.api.answers import Answer
from server.formats.events import CallArguments, CallStart, Reasoning, Text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from server.formats.events import Event
    from server.formats.model_format import AnswerParser
    from server.generation.generator import Generation
    from server.generation.output import Delta
    from server.service import Service


class BlockAnswer(Answer):
    """An answer of one choice. Subclasses say what the blocks and their events are called.

    Attributes: text_block, reasoning_block: names of the blocks of text.
    """

    text_block: str
    reasoning_block: str

    def __init__(
        self, generation: Generation, service: Service, new_parser: Callable[[], AnswerParser]
    ) -> None:
        super().__init__(generation, service)
        self.parser = new_parser()
        self._begun = False

    def events(self, delta: Delta) -> bytes:
        out = self.beginning()
        parts = self.parser.read(delta.text, ended=delta.finish is not None)
        self.note(delta, parts)
        for part in parts:
            match part:
                case Text(text):
                    out += self.more_text(self.text_block, text)
                case Reasoning(text):
                    out += self.more_text(self.reasoning_block, text)
                case CallStart(_, call_id, name):
                    out += self.new_call(call_id, name)
                case CallArguments(_, text):
                    out += self.more_arguments(text)
        return out

    def closing(self) -> bytes:
        return self.beginning() + self.close_block() + self.ending()

    def add(self, delta: Delta) -> None:
        self.events(delta)

    def body(self) -> dict[str, Any]:
        self.closing()
        return self.so_far()

    def beginning(self) -> bytes:
        """What comes before the first block, where it has not come yet."""
        if self._begun:
            return b""
        self._begun = True
        return self.opening()

    @abstractmethod
    def so_far(self) -> dict[str, Any]:
        """The answer as it stands."""

    @abstractmethod
    def note(self, delta: Delta, parts: Sequence[Event]) -> None:
        """Looks at a delta before its parts are written."""

    # Bytes of events; each brings the answer up to date first.

    @abstractmethod
    def opening(self) -> bytes:
        """Before the first block."""

    @abstractmethod
    def more_text(self, kind: str, text: str) -> bytes:
        """More of the block of that kind, which is begun where another one is open."""

    @abstractmethod
    def new_call(self, call_id: str, name: str) -> bytes:
        """A block of a tool call begins."""

    @abstractmethod
    def more_arguments(self, text: str) -> bytes:
        """More of the call that is being written."""

    @abstractmethod
    def close_block(self) -> bytes:
        """The block that is being written ends, if one is."""

    @abstractmethod
    def ending(self) -> bytes:
        """After the last block."""
