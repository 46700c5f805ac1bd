"""Tool calls in a model's text: what all parsers share.

A parser takes text in pieces of any size and gives events; whole answers are fed at once, so that
streamed and whole answers cannot differ. Text that turns out to be no call is given as text.

The time it takes grows with the text's length, not with its square: a model may write blanks, or a
call without an end, as long as its context is. So `_pending`, which is looked at again with each
piece, has a bound between two pieces, and what is longer is held aside and joined once.
"""

from __future__ import annotations

import secrets
import string
from typing import TYPE_CHECKING

from server.formats.events import CallArguments, CallStart, Text
from server.formats.scanning import Held
from server.text.marks import Marks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from server.formats.events import Event


CALL_ID_CHARACTERS = string.ascii_letters + string.digits
# Longer pieces are read in slices, since each call in one cuts what is left of it.
_SLICE = 4096


def openai_call_id() -> str:
    """A call id as OpenAI writes them."""
    return "call_" + secrets.token_hex(12)


def mistral_call_id() -> str:
    """A call id of nine letters and digits: Mistral's templates take no other."""
    return "".join(secrets.choice(CALL_ID_CHARACTERS) for _ in range(9))


def is_mistral_call_id(text: str) -> bool:
    """Whether this is an id as Mistral's templates take it."""
    return len(text) == 9 and set(text) <= set(CALL_ID_CHARACTERS)


class ToolCallParser:
    """Text with a marker before each call, or run of calls.

    A state is a method that uses up some of `_pending` and says whether the next state has
    something to do. `_blanks` stand before `_pending`, and belong to whatever comes to be there.

    Args:
        known: the tools that were offered, each with its parameters' names in order.
        new_id: makes the ids of calls.
    """

    markers: tuple[str, ...] = ()
    _marks = Marks(())

    def __init_subclass__(cls) -> None:
        cls._marks = Marks(cls.markers)

    def __init__(
        self, known: Mapping[str, Sequence[str]], new_id: Callable[[], str] = openai_call_id
    ) -> None:
        self.known = known
        self.calls = 0
        self._new_id = new_id
        self._blanks = Held()
        self._pending = ""
        self._events: list[Event] = []
        self._marker = ""
        self._state: Callable[[bool], bool] = self._text

    def feed(self, text: str) -> list[Event]:
        """The events that this piece of text completes."""
        for begin in range(0, len(text), _SLICE):
            self._pending += text[begin : begin + _SLICE]
            while self._pending and self._state(False):
                pass
        return self._taken()

    def finish(self) -> list[Event]:
        """What is left when the text has ended."""
        while self._state(True):
            pass
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _text(self, final: bool) -> bool:
        text = self._pending
        found = [(at, -len(m), m) for m in self.markers if (at := text.find(m)) >= 0]
        if found:
            at, _, marker = min(found)
            before = text[:at].rstrip()
            self._emit_after_blanks(before)
            # Text after all, if no call comes.
            self._marker = self._blanks.take() + text[len(before) : at] + marker
            self._pending = text[at + len(marker) :]
            self._state = self._after_marker
            return True
        # Blanks before a call belong to neither; what may become a marker waits.
        kept = len(text) - (0 if final else self._marks.undecided(text))
        said = text[:kept] if final and not self.calls else text[:kept].rstrip()
        self._emit_after_blanks(said)
        self._blanks.add(text[len(said) : kept])
        self._pending = text[kept:]
        if final and not self.calls:
            self._emit_text(self._blanks.take())
        return False

    def _after_marker(self, final: bool) -> bool:
        raise AssertionError("each parser has its own")

    def _skip(self, characters: str) -> str:
        """Drops such characters; the next one, or "" when there is none yet."""
        self._pending = self._pending.lstrip(characters)
        return self._pending[:1]

    def _hold_blanks(self) -> str:
        """Sets blanks aside; the character after them, or "" when there is none yet."""
        text = self._pending.lstrip()
        self._blanks.add(self._pending[: len(self._pending) - len(text)])
        self._pending = text
        return text[:1]

    def _emit_after_blanks(self, text: str) -> None:
        if text:
            self._emit_text(self._blanks.take() + text)

    def _emit_text(self, text: str) -> None:
        if text:
            self._events.append(Text(text))

    def _start_call(self, name: str) -> int:
        index, self.calls = self.calls, self.calls + 1
        self._events.append(CallStart(index, self._new_id(), name))
        return index

    def _emit_arguments(self, index: int, text: str) -> None:
        if text:
            self._events.append(CallArguments(index, text))
