"""Parsers of tool calls that are JSON objects: Hermes and Qwen, Llama 3, Mistral."""

from __future__ import annotations

import json
import string
from typing import TYPE_CHECKING

from server.formats.tool_parser import Nesting, ToolCallParser, openai_call_id

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class JsonCall:
    """One object {"name": ..., "arguments": {...}}, read a character at a time.

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
        self._nesting = Nesting()
        self._key: str | None = None  # of the value being read at depth 1
        self._token = ""  # key or value so far, unless it is passed on
        self._object = False  # the value is an argument object, passed on as it comes
        self._blanks = ""  # held back: blanks at the end of the arguments are not part of them
        self._out: list[str] = []  # argument text not yet taken
        self._given = False  # arguments under one of the known keys
        self._others: dict[str, str] = {}  # further keys, with the text of their values

    def feed(self, text: str) -> int:
        """Reads on. Returns: how many characters were used; all of them unless it ended."""
        for used, character in enumerate(text, 1):
            self._character(character)
            if self.ended or self.broken:
                return used
        return len(text)

    def take_arguments(self) -> str:
        """The argument text read since the last call."""
        out, self._out = self._out, []
        return "".join(out)

    def _character(self, c: str) -> None:
        nesting = self._nesting
        if nesting.depth == 0:
            self.broken = c != "{" and not c.isspace()
        elif nesting.depth == 1 and not nesting.quote and self._key is None:
            self._between_values(c)
        elif nesting.depth == 1 and not nesting.quote and c in ",}":
            self._end_value()
            if c == "}":
                self._end()
        elif self._key is None:
            self._token += c
        else:
            self._in_value(c)
        nesting.step(c)

    def _between_values(self, c: str) -> None:
        if c == ":":
            self._key, self._token = self._token.strip().strip('"'), ""
        elif c == "}":
            self._end()
        elif c in "{[":
            self.broken = True
        elif c != ",":
            self._token += c

    def _end(self) -> None:
        """The object is complete. Without arguments, what else stands in it is the arguments."""
        self.ended = True
        self.broken = self.name is None
        if not self._given:
            others = (f"{json.dumps(key)}: {value}" for key, value in self._others.items())
            self._out.append("{" + ", ".join(others) + "}")

    def _in_value(self, c: str) -> None:
        if self._key in self.KEYS and not self._token and c == "{":
            self._object = True
        if not self._object:
            self._token += "" if c.isspace() and not self._token else c
        elif c.isspace() and not self._nesting.quote:
            self._blanks += c
        else:
            self._out.append(self._blanks + c)
            self._blanks = ""

    def _end_value(self) -> None:
        if self._key == "name":
            self.name = _string_of(self._token)
            self.broken = not self.name
        elif self._key in self.KEYS:
            self._given = True
            if not self._object:
                self._out.append(_object_text(self._token))
        elif self._key is not None and self._key not in self.ASIDE:
            self._others[self._key] = self._token.strip()
        self._key, self._token, self._blanks, self._object = None, "", "", False


def _string_of(token: str) -> str | None:
    try:
        value = json.loads(token)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _object_text(token: str) -> str:
    """Arguments that are no object: text that holds one (some models quote it), or nothing."""
    text = token.strip()
    inner = _string_of(text)
    if inner is not None:
        return inner
    return "{}" if text in ("", "null") else text


class JsonCallsParser(ToolCallParser):
    """Calls as JSON objects; subclasses say what stands between them."""

    def __init__(
        self, known: Mapping[str, Sequence[str]], new_id: Callable[[], str] = openai_call_id
    ) -> None:
        super().__init__(known, new_id)
        self._call = JsonCall()
        self._raw = ""  # what was read of a call that has no name yet
        self._index = -1
        self._had_arguments = False

    def _open(self) -> bool:
        self._call, self._raw, self._index = JsonCall(), "", -1
        self._had_arguments = False
        self._state = self._in_call
        return True

    def _in_call(self, final: bool) -> bool:
        call = self._call
        used = call.feed(self._pending)
        piece, self._pending = self._pending[:used], self._pending[used:]
        if self._index < 0:
            self._raw += piece
            if call.name is not None and self._accepts(call.name):
                self._index = self._start_call(call.name)
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
        self._emit_text(self._marker + self._raw)
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
        text = self._pending.lstrip()
        if not final and self.closing.startswith(text) and text != self.closing:
            return False
        if text.startswith(self.closing):
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

    def _beginning(self, final: bool) -> bool:
        first = self._pending.lstrip()[:1]
        if first == "{":
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
        separator = self._pending.lstrip()[:1]
        if separator and separator in ";,":
            rest = self._pending.lstrip()[1:]
            if not rest.strip() and not final:
                return False
            if rest.lstrip().startswith("{"):
                self._pending, self._marker = rest, separator
                return self._open()
        elif separator == "{":
            self._marker = ""
            return self._open()
        elif not separator and not final:
            return False
        self._state = self._text
        return True


class MistralParser(JsonCallsParser):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or from 2025 on [TOOL_CALLS]name{...}
    and [TOOL_CALLS]name[ARGS]{...}."""

    markers = ("[TOOL_CALLS]",)

    def _after_marker(self, final: bool) -> bool:
        first = self._pending.lstrip()[:1]
        if not first and not final:
            return False
        if first == "[":
            self._pending = self._pending.lstrip()[1:]
            self._marker += "["
            return self._open()
        if first == "{":
            return self._open()
        self._state = self._named
        return True

    def _named(self, final: bool) -> bool:
        at = self._pending.find("{")
        if at < 0:
            if final:
                self._raw, self._pending = self._pending, ""
                return self._not_a_call()
            return False
        name = self._pending[:at].split("[", 1)[0].strip()
        self._pending = self._pending[at:]
        self._index = self._start_call(name)
        self._nesting = Nesting()
        self._state = self._bare_arguments
        return True

    def _bare_arguments(self, final: bool) -> bool:
        text = self._pending
        for at, character in enumerate(text, 1):
            self._nesting.step(character)
            if self._nesting.depth == 0:
                self._emit_arguments(self._index, text[:at])
                self._pending = text[at:]
                self._state = self._text
                return True
        self._emit_arguments(self._index, text)
        self._pending = ""
        return False

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
