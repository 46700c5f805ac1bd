"""Parser of tool calls that are written as a list of Python calls."""

from __future__ import annotations

import ast
import json
import re
import string
import warnings
from typing import TYPE_CHECKING, Any

from server.formats.scanning import Held, Nesting
from server.formats.tool_parser import ToolCallParser, openai_call_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

# Looked for again with each piece of text, so names and blanks have an end.
_NAME, _BLANKS = r"[A-Za-z_][\w.-]{0,255}", r"\s{0,255}"
_CALL_HEAD = re.compile(rf"{_BLANKS}({_NAME}){_BLANKS}\(")
_KEY = re.compile(rf"{_BLANKS}({_NAME}){_BLANKS}=(?=[^=])")
_MOST_KEY = 1024  # characters that a key and what is around it may have
# Reading a Python literal takes 3 us an item, on the event loop; reading JSON a tenth of that.
_MOST_ITEMS = 5000
_CALL_HEAD_BEGUN = re.compile(rf"{_BLANKS}({_NAME}{_BLANKS})?")


class PythonicParser(ToolCallParser):
    """[name(key=value, ...), ...] (Llama 3.2 and 4, several small models).

    A call's arguments come as one piece of JSON per argument, as soon as its value is complete. A
    value without a key is of the next parameter, as in Python; where there is none left its
    position is its name, so that nothing is lost and whoever checks the arguments sees it. A list
    whose first element calls no offered tool is text, and so is a call that begins with a value for
    which there is no parameter.
    """

    markers = ("<|python_start|>",)

    def __init__(
        self, known: Mapping[str, Sequence[str]], new_id: Callable[[], str] = openai_call_id
    ) -> None:
        super().__init__(known, new_id)
        self._state = self._beginning
        self._index = -1  # of the call that is being read, once it is sure to be one
        self._name = ""
        self._raw = ""  # what was read of it, to be text if it is none
        self._argument = Held()  # so far
        self._beginning_of_it = ""  # in which its key is, if it has one
        self._given = 0
        self._valued: set[str] = set()  # parameters that have a value
        self._free: Iterator[str] = iter(())  # parameters in order, from the first that had none on
        self._nesting = _nesting()

    def _beginning(self, final: bool) -> bool:
        first = self._hold_blanks()
        if not first and not final:
            return False
        if first == "[":
            self._raw, self._pending = self._blanks.take() + "[", self._pending[1:]
            self._state = self._head
        else:
            self._state = self._text
        return True

    def _after_marker(self, final: bool) -> bool:
        return self._beginning(final)

    def _head(self, final: bool) -> bool:
        head = _CALL_HEAD.match(self._pending)
        if head and (self.calls or head[1] in self.known):
            self._pending = self._pending[head.end() :]
            self._raw += head[0]
            self._index, self._name = -1, head[1]
            self._free, self._valued = iter(self.known.get(head[1], ())), set()
            self._given, self._nesting = 0, _nesting()
            self._state = self._arguments
            return True
        if not head and not final and _CALL_HEAD_BEGUN.fullmatch(self._pending):
            return False
        return self._not_a_call()

    def _not_a_call(self) -> bool:
        self._emit_text(self._marker + self._raw + self._argument.take())
        self._marker = self._raw = ""
        self._state = self._text
        return True

    def _arguments(self, final: bool) -> bool:
        nesting, text, at = self._nesting, self._pending, 0
        while at < len(text):
            at = nesting.plain(text, at)
            if at < len(text):
                if nesting.depth == 0 and not nesting.quote and text[at] in ",)":
                    break
                nesting.step(text[at])
                at += 1
        self._add_to_argument(text[:at])
        self._pending = text[at:]
        if self._pending:
            return self._end_argument()
        return self._not_a_call() if final and self._index < 0 else False

    def _add_to_argument(self, text: str) -> None:
        self._argument.add(text)
        if len(self._beginning_of_it) < _MOST_KEY:
            self._beginning_of_it = (self._beginning_of_it + text)[:_MOST_KEY]
            if self._index < 0 and _KEY.match(self._beginning_of_it):
                self._index = self._start_call(self._name)

    def _end_argument(self) -> bool:
        """Takes the argument before a comma or the closing bracket, which is next."""
        argument, self._beginning_of_it = self._argument.take(), ""
        key, value = self._key_and_value(argument)
        if self._index < 0:
            if value and key is None:
                self._argument.add(argument)
                return self._not_a_call()
            self._index = self._start_call(self._name)
        if value:
            opening = ", " if self._given else "{"
            self._given += 1
            name = json.dumps(str(self._given) if key is None else key)
            self._emit_arguments(self._index, f"{opening}{name}: {_python_value(value)}")
        character, self._pending = self._pending[0], self._pending[1:]
        if character == ")":
            self._emit_arguments(self._index, "}" if self._given else "{}")
            self._state = self._between
        return True

    def _key_and_value(self, argument: str) -> tuple[str | None, str]:
        """An argument's key, None where it has none, and its value as it was written."""
        found = _KEY.match(argument)
        if found:
            key, value = found[1], argument[found.end() :]
        else:
            value = argument.strip()
            key = None if value.startswith("*") else self._next_free()
        if key is not None:
            self._valued.add(key)
        return key, value

    def _next_free(self) -> str | None:
        return next((name for name in self._free if name not in self._valued), None)

    def _between(self, final: bool) -> bool:
        following = self._skip(string.whitespace)
        if not following and not final:
            return False
        self._state = self._head if following == "," else self._text
        if following and following in ",]":
            self._pending = self._pending[1:]
            self._raw = following
        return True


def _nesting() -> Nesting:
    return Nesting("\"'", separators=",")


def _python_value(source: str) -> str:
    """A Python or JSON literal as JSON text; what is neither becomes a string."""
    text = source.strip()
    for read in (_json_literal, _python_literal):
        try:
            return json.dumps(read(text), ensure_ascii=False, allow_nan=False)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _json_literal(text: str) -> Any:
    return json.loads(text, parse_constant=_no_json)


def _no_json(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _python_literal(text: str) -> Any:
    if text.count(",") > _MOST_ITEMS:
        raise ValueError("too long to be read at once")
    with warnings.catch_warnings(action="ignore"):  # odd escapes are the model's, not ours
        return _literal(ast.parse(text, mode="eval").body)


_JSON_NAMES = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {
                str(_literal(key)): _literal(value)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
    raise ValueError("no literal")
