"""Stop expressions: regular expressions that a client sends, and the server's loop runs.

They are Python's (`re`), as SGLang's are. They are matched by `regex`, which can say of a text that
it may be the beginning of a match, and gives up after a time. What it cannot bound is compiling: it
writes out the least number of repetitions, so that `((a{999}){999}){999}` would fill the memory.
Hence an expression is parsed by Python's own parser first, and its size is counted.

RE2 needs no such bounds, and has neither partial matches nor look-behind.
"""

from __future__ import annotations

import re
import time
import warnings
from re import _parser  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any, TypeAlias

import regex

from runtime.errors import InvalidRequest, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

Expression: TypeAlias = "regex.Pattern[str]"

# Together they compile in about 10 ms at worst, on the event loop (about 5 us a character, and
# 0.5 us an item of the written-out form).
MAX_CHARACTERS = 1024
MAX_ITEMS = 10000
# Processor time that the expressions of a text may take: this, and for each piece of text so much
# more per expression. A usual search takes 8 us, most of them to set the limit of its time.
SECONDS = 0.015
SECONDS_A_PIECE = 0.0001
# Text before the undecided part that look-behinds and \b can see.
CONTEXT = 128


def compile_expressions(sources: tuple[str, ...]) -> tuple[Expression, ...]:
    """Compiled expressions.

    Raises: InvalidRequest: one that is wrong, or matches empty text; too much of them together.
    """
    total = sum(map(len, sources))
    if total > MAX_CHARACTERS:
        raise _refused(f"has {total} characters in all; at most {MAX_CHARACTERS} are allowed")
    items = 0
    found = []
    for source in sources:
        items += _size(source)
        if items > MAX_ITEMS:
            raise _refused(
                f"{shown(source)}: its repetitions, one within another, are too many to write out"
                f" (at most {MAX_ITEMS} items are allowed)"
            )
        found.append(_compiled(source))
    return tuple(found)


def _size(source: str) -> int:
    """Items of an expression.

    Raises: InvalidRequest: it is none.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what may mean something else in a later Python
            return _items(_parser.parse(source))
    except (re.error, OverflowError, RecursionError) as error:
        raise _wrong(source, error) from None


def _compiled(source: str) -> Expression:
    try:
        pattern = regex.compile(source)
        empty = pattern.fullmatch("", timeout=SECONDS) is not None
    except TimeoutError:
        raise _refused(f"{shown(source)}: takes too long to match") from None
    except Exception as error:  # a client's text may not find a hole of the library
        raise _wrong(source, error) from None
    if empty:
        raise _refused(f"{shown(source)}: matches empty text; it must match something")
    return pattern


def _items(parsed: Any) -> int:
    """Single characters, sets and positions of an expression once repetitions are written out."""
    total = 0
    for operation, argument in parsed:
        name = str(operation)
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            least, _, body = argument
            total += (least + 1) * _items(body)
        else:
            total += 1 + sum(map(_items, _bodies(name, argument)))
    return total


def _bodies(name: str, argument: Any) -> Iterable[Any]:
    """The expressions within one item."""
    if name == "SUBPATTERN":
        return (argument[3],)
    if name == "BRANCH":
        return tuple(argument[1])
    if name in ("ASSERT", "ASSERT_NOT"):
        return (argument[1],)
    if name == "ATOMIC_GROUP":
        return (argument,)
    if name == "GROUPREF_EXISTS":
        return tuple(body for body in argument[1:] if body is not None)
    return ()


def _wrong(source: str, error: Exception) -> InvalidRequest:
    reason = str(error) or type(error).__name__
    if isinstance(error, RecursionError):
        reason = "has too many groups, one within another"
    return _refused(f"{shown(source)}: {reason}")


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"stop_regex: {reason}", param="stop_regex")


class ExpressionScanner:
    """Where one text stands against its stop expressions."""

    __slots__ = ("_before", "_expressions", "_left_s")

    def __init__(self, expressions: tuple[Expression, ...]) -> None:
        self._expressions = expressions
        self._left_s = SECONDS
        self._before = ""  # the end of what was let through

    def let_through(self, text: str) -> None:
        """Notes text that cannot be part of a match any more, but may be looked back at."""
        self._before = (self._before + text)[-CONTEXT:]

    def look(self, undecided: str) -> tuple[list[tuple[int, int, str]], int]:
        """Matches in the undecided text, as (start, end, source), and the index from which it may
        be the beginning of one.

        Raises: InvalidRequest: they have taken more time than a request's expressions may.
        """
        more_s = SECONDS_A_PIECE * len(self._expressions)
        self._left_s = min(self._left_s + more_s, SECONDS)
        matches = []
        keep = len(undecided)
        for expression in self._expressions:
            found = self._search(expression, undecided, partial=True)
            if found is not None and found.partial:
                keep = min(keep, found.start() - len(self._before))
                found = self._search(expression, undecided, partial=False)
            if found is not None and found.end() > found.start():
                start, end = found.start() - len(self._before), found.end() - len(self._before)
                matches.append((start, end, expression.pattern))
        return matches, keep

    def _search(
        self, expression: Expression, undecided: str, *, partial: bool
    ) -> regex.Match[str] | None:
        while self._left_s > 0:
            started = time.thread_time()
            try:
                return expression.search(
                    self._before + undecided,
                    pos=len(self._before),
                    partial=partial,
                    timeout=SECONDS,
                )
            except TimeoutError:
                # By the clock on the wall: a thread that did not run is no fault of the client's.
                continue
            finally:
                self._left_s -= time.thread_time() - started
        raise _refused(
            "the expressions take too long to match; give ones that need less backtracking"
        )
