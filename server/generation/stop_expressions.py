"""Stop expressions: regular expressions that a client sends, and the server's loop runs.

They are matched by RE2, in time that grows with the text and never with its square or worse; a
client may send anything. (`re` and `regex` backtrack. The latter's time limit is looked at too
seldom to be one, and its table of a text of 1,000 characters takes 0.4 s.) So there are no
references back and nothing looks ahead or behind, and \\d, \\w, \\s and \\b know ASCII alone.

RE2 cannot say of a text that it may be the beginning of a match. Hence an expression is read by
Python's own parser, and written down twice: as it is, and as what matches its matches' beginnings.
"""

from __future__ import annotations

import re
import warnings
from re import _parser  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any

import re2

from runtime.errors import InvalidRequest, shown
from server.grammars.nesting import regex_nesting

if TYPE_CHECKING:
    from collections.abc import Iterable

# Together they compile in some 5 ms, and look at a piece of text in 2 ms at worst (usually 10 us).
MAX_CHARACTERS = 512
MAX_PROGRAM = 2000  # RE2's instructions, of which most are for characters beyond ASCII
MAX_NESTING = 10  # groups within groups
MAX_WRITTEN = 8192  # characters of what is handed to RE2
# Longer matches are not found: so much text may be held back, and looked at again and again.
LONGEST = 256
# Text before the undecided part that \b can see.
CONTEXT = 16

_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
_CATEGORIES = {
    "CATEGORY_DIGIT": r"\d",
    "CATEGORY_NOT_DIGIT": r"\D",
    "CATEGORY_SPACE": r"\s",
    "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w",
    "CATEGORY_NOT_WORD": r"\W",
}
_PLACES = {
    "AT_BEGINNING": "^",
    "AT_BEGINNING_STRING": r"\A",
    "AT_BOUNDARY": r"\b",
    "AT_NON_BOUNDARY": r"\B",
    "AT_END": "$",
    "AT_END_STRING": r"\z",
}
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT")
_FLAGS = ((re.IGNORECASE, "i"), (re.MULTILINE, "m"), (re.DOTALL, "s"))


class Expression:
    """A compiled expression.

    Raises: InvalidRequest: it is wrong, or not of those that RE2 has, or matches empty text.
    """

    __slots__ = ("_beginning", "_whole", "size", "source")

    def __init__(self, source: str) -> None:
        self.source = source
        if regex_nesting(source) > MAX_NESTING:
            raise _wrong(source, f"has groups more than {MAX_NESTING} levels deep")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what may mean something else in a later Python
                parsed = _parser.parse(source)
            flags = _flags(parsed.state.flags)
            beginning = _beginning(parsed)
            if len(beginning) > MAX_WRITTEN:
                raise ValueError("has too many items in groups that may be cut")
            self._whole = re2.compile(flags + _whole(parsed), _OPTIONS)
            self._beginning = re2.compile(rf"{flags}(?:{beginning})\z", _OPTIONS)
        except (re.error, re2.error, ValueError, OverflowError) as error:
            told = error.args[0] if error.args else error
            told = told.decode("utf-8", "replace") if isinstance(told, bytes) else str(told)
            raise _wrong(source, told) from None
        self.size = self._whole.programsize + self._beginning.programsize
        if self._whole.fullmatch(""):
            raise _wrong(source, "matches empty text; it must match something")

    def find(self, text: str, start: int) -> tuple[int, int] | None:
        """The first match in a text from `start` on that is not empty."""
        found = self._whole.search(text, start)
        return None if found is None or found.end() == found.start() else found.span()

    def undecided_from(self, text: str, start: int) -> int:
        """The index from which the text may be the beginning of a match."""
        return int(self._beginning.search(text, start).start())


def compile_expressions(sources: tuple[str, ...]) -> tuple[Expression, ...]:
    """Compiled expressions.

    Raises: InvalidRequest: one that is wrong, or matches empty text; too much of them together.
    """
    total = sum(map(len, sources))
    if total > MAX_CHARACTERS:
        raise _refused(f"has {total} characters in all; at most {MAX_CHARACTERS} are allowed")
    found = tuple(map(Expression, sources))
    if sum(one.size for one in found) > MAX_PROGRAM:
        raise _refused(f"{shown(sources[0])}: is too large once its repetitions are written out")
    return found


def _whole(parsed: Any) -> str:
    """RE2's text for an expression."""
    return "".join(_item(str(operation), argument, _whole) for operation, argument in parsed)


def _beginning(parsed: Any) -> str:
    """RE2's text for what the texts of an expression begin with, the empty text among it."""
    text = ""
    for operation, argument in reversed(list(parsed)):
        name = str(operation)
        if name in _REPEATS:
            _, most, body = argument
            most = "" if most == _parser.MAXREPEAT else max(int(most) - 1, 0)
            begun = f"(?:{_whole(body)}){{0,{most}}}{_beginning(body)}"
        elif name in ("SUBPATTERN", "BRANCH"):
            begun = _item(name, argument, _beginning)
        else:
            text = f"(?:{_item(name, argument, _whole)}{text})?"
            continue
        text = f"(?:{begun}|{_item(name, argument, _whole)}{text})" if text else f"(?:{begun})"
    return text


def _item(name: str, argument: Any, body: Any) -> str:
    """RE2's text for one item. Args: body: writes the expressions within it."""
    if name == "LITERAL":
        return re.escape(chr(argument))
    if name == "NOT_LITERAL":
        return f"[^{re.escape(chr(argument))}]"
    if name == "ANY":
        return "."
    if name == "IN":
        return f"[{''.join(_member(str(kind), value) for kind, value in argument)}]"
    if name == "AT":
        return _PLACES[str(argument)]
    if name == "BRANCH":
        return f"(?:{'|'.join(map(body, argument[1]))})"
    if name == "SUBPATTERN":
        _, added, removed, inner = argument
        off = _flags(removed, "-")
        return f"(?:{_flags(added)}{off}{body(inner)})"
    if name in _REPEATS:
        least, most, inner = argument
        most = "" if most == _parser.MAXREPEAT else most
        lazy = "?" if name == "MIN_REPEAT" else ""
        return f"(?:{body(inner)}){{{least},{most}}}{lazy}"
    raise ValueError(f"{name.lower().replace('_', ' ')} is not supported")


def _member(kind: str, value: Any) -> str:
    if kind == "NEGATE":
        return "^"
    if kind == "RANGE":
        low, high = value
        return f"{re.escape(chr(low))}-{re.escape(chr(high))}"
    if kind == "CATEGORY":
        return _CATEGORIES[str(value)]
    return re.escape(chr(value))


def _flags(flags: int, sign: str = "") -> str:
    names = "".join(name for flag, name in _FLAGS if flags & flag)
    return f"(?{sign}{names})" if names else ""


def _wrong(source: str, reason: str) -> InvalidRequest:
    return _refused(f"{shown(source)}: {reason}")


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"stop_regex: {reason}", param="stop_regex")


class ExpressionScanner:
    """Where one text stands against its stop expressions."""

    __slots__ = ("_before", "_expressions")

    def __init__(self, expressions: Iterable[Expression]) -> None:
        self._expressions = tuple(expressions)
        self._before = ""  # the end of what was let through

    def let_through(self, text: str) -> None:
        """Notes text that cannot be part of a match any more, but may be looked back at."""
        self._before = (self._before + text)[-CONTEXT:]

    def look(self, undecided: str) -> tuple[list[tuple[int, int, str]], int]:
        """Matches in the undecided text, as (start, end, source), and the index from which it may
        be the beginning of one."""
        before = len(self._before)
        text = self._before + undecided
        matches = []
        keep = len(text)
        for expression in self._expressions:
            found = expression.find(text, before)
            if found is not None:
                matches.append((found[0] - before, found[1] - before, expression.source))
            keep = min(keep, expression.undecided_from(text, before))
        return matches, max(keep - before, len(undecided) - LONGEST)
