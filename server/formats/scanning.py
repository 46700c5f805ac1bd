"""Text that comes in pieces, read in time that grows with its length and not with its square."""

from __future__ import annotations

import re
from functools import cache


class Held:
    """Text that is kept until it is known what it belongs to, in the pieces that it came in."""

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, text: str) -> None:
        """Keeps more."""
        if text:
            self._pieces.append(text)

    def take(self) -> str:
        """All of it; nothing is held from here on."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text


class Nesting:
    """How deep inside brackets, and whether inside a string, a text is.

    Args:
        quotes: characters that open a string, which the same character closes.
        separators: characters that the reader wants to see as well, `level` deep outside strings.
    """

    __slots__ = ("_all", "_brackets", "_escaped", "_level", "_quotes", "depth", "quote")

    def __init__(self, quotes: str = '"', separators: str = "", level: int = 0) -> None:
        self.depth = 0
        self.quote = ""
        self._quotes = quotes
        self._level = level
        self._escaped = False
        self._brackets = _any_of(quotes + "{}[]()")
        self._all = _any_of(quotes + "{}[]()" + separators)

    def plain(self, text: str, at: int) -> int:
        """Where the characters end, from this one on, that change nothing and part nothing."""
        if self._escaped:
            return at
        if self.quote:
            pattern = _any_of(self.quote + "\\")
        else:
            pattern = self._all if self.depth == self._level else self._brackets
        found = pattern.search(text, at)
        return len(text) if found is None else found.start()

    def step(self, c: str) -> None:
        """Reads one character, be it plain or not."""
        if self.quote:
            if c == self.quote and not self._escaped:
                self.quote = ""
            self._escaped = c == "\\" and not self._escaped
        elif c in self._quotes:
            self.quote = c
        elif c in "{[(":
            self.depth += 1
        elif c in "}])":
            self.depth -= 1


@cache
def _any_of(characters: str) -> re.Pattern[str]:
    return re.compile(f"[{re.escape(characters)}]")
