"""Parsers of tool calls that are JSON objects: Hermes and Qwen, Llama 3, Mistral."""

from __future__ import annotations

import json
import string
from typing import TYPE_CHECKING

from server.formats.scanning import Held, Nesting
from server.formats.tool_parser import ToolCallParser, openai_call_id

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


# What may stand before the arguments of a call that is no JSON object: a name and an id.
_MOST_HEAD = 1024
# What ends a value of a call: a model may close the call by the wrong bracket.
_ENDS = ",}])"


class JsonCall:
    """One object {"name": ..., "arguments": {...}}, read in pieces of any size.

    Attributes:
        name: once read.
        ended, broken: the object is complete; it is no such object.
    """

    KEYS = ("arguments", "parameters")
    ASIDE = ("id", "type", "index")  # keys that say nothing of the arguments

    def __init__(self) -> None:
        self.name: str | None = None
        self.ended = False
        self.broken = False
        self._nesting = Nesting(separators=":,", level=1)
        self._key: str | None = None  # of the value being read at depth 1
        self._token = Held()  # key or value so far, unless it is passed on
        self._object = False  # the value is an argument object, passed on as it comes
        self._blanks = Held()  # at the end of the arguments, which they are not part of
        self._out = Held()  # argument text not yet taken
        self._given = False  # arguments under one of the known keys
        self._others: dict[str, str] = {}  # further keys, with the text of their values

    def feed(self, text: str) -> int:
        """Reads on. Returns: how many characters were used; all of them unless it ended or broke
        off."""
        nesting, at = self._nesting, 0
        while at < len(text) and not self.ended and not self.broken:
            if nesting.depth == 0:
                at = len(text) - len(text[at:].lstrip())
                self.broken = at < len(text) and text[at] != "{"
                if self.broken or at == len(text):
                    break
            end = nesting.plain(text, at)
            if end > at:
                self._plain(text[at:end])
                at = end
            else:
                self._character(text[at])
                at += 1
        return at

    def take_arguments(self) -> str:
        """The argument text read since the last call."""
        return self._out.take()

    def _character(self, c: str) -> None:
        nesting = self._nesting
        if nesting.depth == 1 and not nesting.quote and self._key is None:
            self._between_values(c)
        elif nesting.depth == 1 and not nesting.quote and c in _ENDS:
            self._end_value()
            if c != ",":
                self._end()
        elif nesting.depth != 0:
            self._plain(c)
        nesting.step(c)

    def _between_values(self, c: str) -> None:
        if c == ":":
            self._key = self._token.take().strip().strip('"')
        elif c in _ENDS and c != ",":
            self._end()
        elif c in "{[":
            self.broken = True
        elif c != ",":
            self._token.add(c)

    def _end(self) -> None:
        """The object is complete. Without arguments, what else stands in it is the arguments."""
        self.ended = True
        self.broken = self.name is None
        if not self._given:
            others = (f"{json.dumps(key)}: {value}" for key, value in self._others.items())
            self._out.add("{" + ", ".join(others) + "}")

    def _plain(self, text: str) -> None:
        """More of a key or a value."""
        if self._key is None:
            self._token.add(text)
            return
        if not self._token and not self._object:
            text = text.lstrip()
            self._object = self._key in self.KEYS and text.startswith("{")
        if not self._object:
            self._token.add(text)
            return
        said = text if self._nesting.quote else text.rstrip()
        if said:
            self._out.add(self._blanks.take() + said)
        self._blanks.add(text[len(said) :])

    def _end_value(self) -> None:
        token = self._token.take()
        if self._key == "name":
            self.name = _string_of(token)
            self.broken = not self.name
        elif self._key in self.KEYS:
            self._given = True
            if not self._object:
                self._out.add(_object_text(token))
        elif self._key is not None and self._key not in self.ASIDE:
            self._others[self._key] = token.strip()
        self._blanks.take()
        self._key, self._object = None, False


def _string_of(token: str) -> str | None:
    # Anything else may be nested more deeply than the parser's stack is.
    if not token.startswith('"'):
        return None
    try:
        value = json.loads(token)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _object_text(token: str) -> str:
    """Arguments that are no object: a string that holds one (some models quote it) is that, nothing
    is an empty one, and the rest stays as it was written."""
    text = token.strip()
    inner = _string_of(text)
    if inner is not None and inner.lstrip().startswith("{"):
        return inner
    return "{}" if text in ("", "null") else text


class JsonCallsParser(ToolCallParser):
    """Calls as JSON objects; subclasses say what stands between them."""

    def __init__(
        self, known: Mapping[str, Sequence[str]], new_id: Callable[[], str] = openai_call_id
    ) -> None:
        super().__init__(known, new_id)
        self._call = JsonCall()
        self._raw = Held()  # what was read of a call that has no name yet
        self._index = -1
        self._had_arguments = False

    def _open(self) -> bool:
        self._raw.take()
        self._call, self._index = JsonCall(), -1
        self._had_arguments = False
        self._state = self._in_call
        return True

    def _in_call(self, final: bool) -> bool:
        call = self._call
        used = call.feed(self._pending)
        piece, self._pending = self._pending[:used], self._pending[used:]
        if self._index < 0:
            self._raw.add(piece)
            if call.name is not None and self._accepts(call.name):
                self._index = self._start_call(call.name)
                self._raw.take()
            elif call.name is not None or call.broken or call.ended or final:
                return self._not_a_call()
        if self._index >= 0:
            arguments = call.take_arguments()
            self._had_arguments |= bool(arguments)
            if call.ended and not self._had_arguments:
                arguments = "{}"
            self._emit_arguments(self._index, arguments)
        if call.ended or call.broken:
            self._state = self._between
            return True
        return False

    def _not_a_call(self) -> bool:
        self._emit_text(self._marker + self._raw.take())
        self._marker = ""
        self._state = self._text
        return True

    def _accepts(self, name: str) -> bool:
        return True

    def _between(self, final: bool) -> bool:
        raise AssertionError("each parser has its own")


class HermesParser(JsonCallsParser):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call> (Hermes 2, Qwen 2.5 and 3)."""

    markers = ("<tool_call>",)
    closing = "</tool_call>"

    def _after_marker(self, final: bool) -> bool:
        return self._open()

    def _between(self, final: bool) -> bool:
        self._hold_blanks()
        text = self._pending
        if not final and self.closing.startswith(text) and text != self.closing:
            return False
        if text.startswith(self.closing):
            self._blanks.take()
            self._pending = text[len(self.closing) :]
        self._state = self._text
        return True


class Llama3JsonParser(JsonCallsParser):
    """{"name": ..., "parameters": {...}}, several parted by ";" (Llama 3.1, 3.2).

    The answer is nothing but calls, or a call follows <|python_tag|>. An object that names no
    offered tool is text.
    """

    markers = ("<|python_tag|>",)

    def __init__(
        self, known: Mapping[str, Sequence[str]], new_id: Callable[[], str] = openai_call_id
    ) -> None:
        super().__init__(known, new_id)
        self._state = self._beginning
        self._before = ""  # blanks before a separator

    def _beginning(self, final: bool) -> bool:
        first = self._hold_blanks()
        if first == "{":
            self._marker = self._blanks.take()
            return self._open()
        if first or final:
            self._state = self._text
            return True
        return False

    def _after_marker(self, final: bool) -> bool:
        return self._open()

    def _accepts(self, name: str) -> bool:
        return name in self.known

    def _between(self, final: bool) -> bool:
        first = self._hold_blanks()
        if not first and not final:
            return False
        if first == "{":
            self._marker = self._blanks.take()
            return self._open()
        if first and first in ";,":
            self._before, self._marker = self._blanks.take(), first
            self._pending = self._pending[1:]
            self._state = self._after_separator
        else:
            self._state = self._text
        return True

    def _after_separator(self, final: bool) -> bool:
        first = self._hold_blanks()
        if not first and not final:
            return False
        self._marker += self._blanks.take()
        if first == "{":
            return self._open()
        self._pending = self._before + self._marker + self._pending
        self._state = self._text
        return True


class MistralParser(JsonCallsParser):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or from 2025 on [TOOL_CALLS]name{...}
    and [TOOL_CALLS]name[ARGS]{...}."""

    markers = ("[TOOL_CALLS]",)

    def _after_marker(self, final: bool) -> bool:
        first = self._hold_blanks()
        if not first and not final:
            return False
        self._marker += self._blanks.take()
        if first == "[":
            self._pending = self._pending[1:]
            self._marker += "["
            return self._open()
        if first == "{":
            return self._open()
        self._state = self._named
        return True

    def _named(self, final: bool) -> bool:
        at = self._pending.find("{", 0, _MOST_HEAD)
        if at < 0:
            return self._not_a_call() if final or len(self._pending) >= _MOST_HEAD else False
        name = self._pending[:at].split("[", 1)[0].strip()
        self._pending = self._pending[at:]
        self._index = self._start_call(name)
        self._nesting = Nesting()
        self._state = self._bare_arguments
        return True

    def _bare_arguments(self, final: bool) -> bool:
        nesting, text, at = self._nesting, self._pending, 0
        while at < len(text):
            at = nesting.plain(text, at)
            if at < len(text):
                nesting.step(text[at])
                at += 1
                if nesting.depth == 0:
                    self._state = self._text
                    break
        self._emit_arguments(self._index, text[:at])
        self._pending = text[at:]
        return nesting.depth == 0

    def _between(self, final: bool) -> bool:
        following = self._skip(string.whitespace + ",")
        if following == "{":
            self._marker = ""
            return self._open()
        if following == "]":
            self._pending = self._pending[1:]
        elif not following and not final:
            return False
        self._state = self._text
        return True


class GraniteParser(MistralParser):
    """<|tool_call|>[{"name": ..., "arguments": {...}}, ...] (Granite 3, Phi 4 mini)."""

    markers = ("<|tool_call|>",)
