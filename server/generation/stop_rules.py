"""Stop strings and stop expressions over a stream of text.

Text that may be the beginning of a stop is held back until it is decided; text that no stop can
begin in goes out at once, so an answer with stops streams like one without. A stop is found where
it *starts* first; of two that start together, the longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import regex

from runtime.errors import InvalidRequest

# A stop expression is the client's own program: it may not hold up everybody's tokens.
REGEX_SECONDS = 0.02
# Text before the held-back part that look-behinds and \b of a stop expression can see.
REGEX_CONTEXT = 128


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends a text. Built once per request, shared by its choices."""

    strings: tuple[str, ...] = ()
    expressions: tuple[regex.Pattern[str], ...] = ()
    include_in_output: bool = False

    def __bool__(self) -> bool:
        return bool(self.strings or self.expressions)


def compile_stops(
    strings: tuple[str, ...], expressions: tuple[str, ...] = (), include_in_output: bool = False
) -> StopRules:
    """Rules from what a request gave.

    Raises: InvalidRequest: an expression that cannot be compiled, or that matches empty text.
    """
    compiled = []
    for source in expressions:
        try:
            pattern = regex.compile(source)
            if pattern.fullmatch("", timeout=REGEX_SECONDS):
                raise InvalidRequest(
                    f"stop_regex {source!r}: matches empty text; it must match something",
                    param="stop_regex",
                )
        except (regex.error, TimeoutError) as error:
            raise InvalidRequest(f"stop_regex {source!r}: {error}", param="stop_regex") from None
        compiled.append(pattern)
    return StopRules(strings, tuple(compiled), include_in_output)


class StopScanner:
    """Where one text stands against its stop rules."""

    __slots__ = ("_before", "_held", "_rules", "matched")

    def __init__(self, rules: StopRules) -> None:
        self._rules = rules
        self._held = ""
        self._before = ""  # the end of what was let through, for expressions
        self.matched: str | None = None  # the stop string, or the source of the expression

    def feed(self, text: str) -> str:
        """The text that may be shown now. After a match, `matched` is set and nothing follows."""
        if not text:
            return ""
        buffer = self._held + text
        hit = self._first_match(buffer)
        if hit is not None:
            start, end, self.matched = hit
            self._held = ""
            return buffer[: end if self._rules.include_in_output else start]
        keep = self._first_undecided(buffer)
        self._held = buffer[keep:]
        shown = buffer[:keep]
        if self._rules.expressions:
            self._before = (self._before + shown)[-REGEX_CONTEXT:]
        return shown

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._rules.strings:
            start = buffer.find(stop)
            if start >= 0:
                best = _earlier(best, (start, start + len(stop), stop))
        for pattern in self._rules.expressions:
            span = self._search(pattern, buffer, partial=False)
            if span is not None:
                best = _earlier(best, (*span, pattern.pattern))
        return best

    def _first_undecided(self, buffer: str) -> int:
        """Index from which the buffer may be the beginning of a stop."""
        keep = len(buffer)
        for stop in self._rules.strings:
            start = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
            while 0 <= start < keep and not stop.startswith(buffer[start:]):
                start = buffer.find(stop[0], start + 1)
            if start >= 0:
                keep = min(keep, start)
        for pattern in self._rules.expressions:
            span = self._search(pattern, buffer, partial=True)
            if span is not None:
                keep = min(keep, span[0])
        return keep

    def _search(
        self, pattern: regex.Pattern[str], buffer: str, *, partial: bool
    ) -> tuple[int, int] | None:
        """Span of a match within the buffer; an expression that takes too long matches nothing."""
        offset = len(self._before)
        try:
            found = pattern.search(
                self._before + buffer, pos=offset, partial=partial, timeout=REGEX_SECONDS
            )
        except TimeoutError:
            return None
        if found is None or (found.start() == found.end() and not partial):
            return None
        return found.start() - offset, found.end() - offset


def _earlier(
    best: tuple[int, int, str] | None, other: tuple[int, int, str]
) -> tuple[int, int, str]:
    if best is None or (other[0], -other[1]) < (best[0], -best[1]):
        return other
    return best
