"""Stop strings and stop expressions over a stream of text.

Text that may be the beginning of a stop is held back until it is decided; text that no stop can
begin in goes out at once, so an answer with stops streams like one without. A stop is found where
it *starts* first; of two that start together, the longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.errors import InvalidRequest
from server.generation.stop_expressions import ExpressionScanner, compile_expressions
from server.text.marks import Marks

if TYPE_CHECKING:
    from server.generation.stop_expressions import Expression

# Of the stop strings: preparing them takes 1 to 2 us a character, on the event loop.
MAX_CHARACTERS = 8192


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends a text. Built once per request, shared by its choices."""

    strings: tuple[str, ...] = ()
    expressions: tuple[Expression, ...] = ()
    automaton: Marks | None = None  # of the strings


def compile_stops(strings: tuple[str, ...], expressions: tuple[str, ...] = ()) -> StopRules:
    """Rules from what a request gave. None of the strings is empty.

    Raises: InvalidRequest: an expression that cannot be compiled, or that matches empty text; more
        of either than can be looked for without holding up everybody's tokens.
    """
    total = sum(map(len, dict.fromkeys(strings)))
    if total > MAX_CHARACTERS:
        raise InvalidRequest(
            f"stop: has {total} characters in all; at most {MAX_CHARACTERS} are allowed",
            param="stop",
        )
    return StopRules(
        strings,
        compile_expressions(expressions),
        Marks(strings) if strings else None,
    )


class StopScanner:
    """Where one text stands against its stop rules. Args: include: the text shows what ends it."""

    __slots__ = ("_automaton", "_expressions", "_held", "_include_stop", "_state", "matched")

    def __init__(self, rules: StopRules, *, include: bool = False) -> None:
        self._automaton = rules.automaton
        self._state = 0
        self._expressions = ExpressionScanner(rules.expressions) if rules.expressions else None
        self._include_stop = include
        self._held = ""
        self.matched: str | None = None  # the stop string, or the source of the expression

    def feed(self, text: str) -> str:
        """The text that may be shown now. After a match, `matched` is set and nothing follows."""
        if not text:
            return ""
        known = len(self._held)
        undecided = self._held + text
        best, keep = self._look_for_strings(undecided, known)
        if self._expressions is not None:
            matches, expressions_keep = self._expressions.look(undecided)
            keep = min(keep, expressions_keep)
            for match in matches:
                best = _earlier(best, match)
        if best is not None:
            start, end, self.matched = best
            self._held = ""
            return undecided[: end if self._include_stop else start]
        shown, self._held = undecided[:keep], undecided[keep:]
        if self._expressions is not None:
            self._expressions.let_through(shown)
        return shown

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _look_for_strings(
        self, undecided: str, known: int
    ) -> tuple[tuple[int, int, str] | None, int]:
        """The first stop string, if there is one, and the index from which the text may be the
        beginning of one. The automaton has seen the first `known` characters."""
        automaton = self._automaton
        if automaton is None:
            return None, len(undecided)
        best: tuple[int, int, str] | None = None
        state = self._state
        for end, character in enumerate(undecided[known:], known + 1):
            state = automaton.step(state, character)
            if best is not None and end - automaton.depth[state] > best[0]:
                break  # whatever is complete later also starts later
            if length := automaton.length[state]:
                best = _earlier(best, (end - length, end, undecided[end - length : end]))
        self._state = state
        return best, len(undecided) - automaton.depth[state]


def _earlier(
    best: tuple[int, int, str] | None, other: tuple[int, int, str]
) -> tuple[int, int, str]:
    if best is None or (other[0], -other[1]) < (best[0], -best[1]):
        return other
    return best
