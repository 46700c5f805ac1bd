"""Parser of tool calls that are written as a list of Python calls."""

from __future__ import annotations

import ast
import json
import re
import string
import warnings
from typing import TYPE_CHECKING, Any

from server.formats.tool_parser import Nesting, ToolCallParser, openai_call_id

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# Looked for again with each piece of text, so names and blanks have an end.
_NAME, _BLANKS = r"[A-Za-z_][\w.-]{0,255}", r"\s{0,255}"
_CALL_HEAD = re.compile(rf"{_BLANKS}({_NAME}){_BLANKS}\(")
_KEY = re.compile(rf"{_BLANKS}({_NAME}){_BLANKS}=(?=[^=])")
_CALL_HEAD_BEGUN = re.compile(rf"{_BLANKS}({_NAME}{_BLANKS})?")


class PythonicParser(ToolCallParser):
    """[name(key=value, ...), ...] (Llama 3.2 and 4, several small models).

    A call's arguments come as one piece of JSON per argument, as soon as its value is complete. A
    value without a key is of the next parameter, as in Python. A list whose first element calls no
    offered tool is text, and so is a call that begins with a value for which there is no parameter.
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
        self._argument = ""  # so far
        self._given = 0
        self._free: list[str] = []  # parameters without a value
        self._nesting = Nesting()

    def _beginning(self, final: bool) -> bool:
        first = self._pending.lstrip()[:1]
        if not first and not final:
            return False
        if first == "[":
            at = self._pending.index("[") + 1
            self._raw, self._pending = self._pending[:at], self._pending[at:]
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
            self._free = list(self.known.get(head[1], ()))
            self._argument, self._given, self._nesting = "", 0, Nesting("\"'")
            self._state = self._arguments
            return True
        if not head and not final and _CALL_HEAD_BEGUN.fullmatch(self._pending):
            return False
        return self._not_a_call()

    def _not_a_call(self) -> bool:
        self._emit_text(self._marker + self._raw + self._argument)
        self._marker = self._raw = self._argument = ""
        self._state = self._text
        return True

    def _arguments(self, final: bool) -> bool:
        nesting = self._nesting
        for at, character in enumerate(self._pending):
            top = nesting.depth == 0 and not nesting.quote
            if top and character in ",)":
                self._pending = self._pending[at:]
                return self._end_argument()
            nesting.step(character)
            self._argument += character
            if self._index < 0 and _KEY.match(self._argument):
                self._index = self._start_call(self._name)
        self._pending = ""
        return self._not_a_call() if final and self._index < 0 else False

    def _end_argument(self) -> bool:
        """Takes the argument before a comma or the closing bracket, which is next."""
        key, value = self._key_and_value()
        if self._index < 0:
            if value and key is None:
                return self._not_a_call()
            self._index = self._start_call(self._name)
        if value:
            opening = ", " if self._given else "{"
            self._given += 1
            # Without a key it is no JSON: better than arguments in which a value is missing.
            item = "" if key is None else json.dumps(key) + ": "
            self._emit_arguments(self._index, opening + item + _python_value(value))
        self._argument = ""
        character, self._pending = self._pending[0], self._pending[1:]
        if character == ")":
            self._emit_arguments(self._index, "}" if self._given else "{}")
            self._state = self._between
        return True

    def _key_and_value(self) -> tuple[str | None, str]:
        """An argument's key, None where it has none, and its value as it was written."""
        found = _KEY.match(self._argument)
        if found:
            key, value = found[1], self._argument[found.end() :]
        else:
            value = self._argument.strip()
            key = self._free[0] if self._free and not value.startswith("*") else None
        if key in self._free:
            self._free.remove(key)
        return key, value

    def _between(self, final: bool) -> bool:
        following = self._skip(string.whitespace)
        if not following and not final:
            return False
        self._state = self._head if following == "," else self._text
        if following and following in ",]":
            self._pending = self._pending[1:]
            self._raw = following
        return True


def _python_value(source: str) -> str:
    """A Python or JSON literal as JSON text; what is neither becomes a string."""
    try:
        with warnings.catch_warnings(action="ignore"):  # odd escapes are the model's, not ours
            node = ast.parse(source.strip(), mode="eval").body
        return json.dumps(_literal(node), ensure_ascii=False)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return json.dumps(source.strip(), ensure_ascii=False)


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
