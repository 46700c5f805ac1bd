"""Marks in text that comes in pieces: which one the text ends with, and what may yet become one.

Stop strings, the marks of tool calls and those of reasoning are all looked for in this way, by the
automaton of Aho and Corasick (Efficient string matching, CACM 18(6), 1975). Its state is the
longest end of the text that begins a mark, so its depth is also how much of the text is undecided.
The time it takes does not depend on how many marks there are.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Marks:
    """The automaton of a set of marks, none empty. State 0 is the empty beginning.

    Attributes:
        depth: by state, characters of the beginning that it stands for.
        length: by state, characters of the longest mark that its beginning ends with, or 0.

    Cost: 1 to 2 us a character of the marks, when it is made.
    """

    __slots__ = ("_fallback", "_longest", "_next", "depth", "length")

    def __init__(self, marks: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]  # the longest end of a state's beginning that is a beginning too
        self.depth = [0]
        self.length = [0]
        for mark in marks:
            self._add(mark)
        self._link()
        self._longest = max(self.depth)

    def _add(self, mark: str) -> None:
        state = 0
        for character in mark:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self._fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.length.append(0)
            state = following
        self.length[state] = len(mark)

    def _link(self) -> None:
        """Sets the fallbacks, shorter beginnings first."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            self.length[state] = self.length[state] or self.length[self._fallback[state]]
            for character, following in self._next[state].items():
                self._fallback[following] = self.step(self._fallback[state], character)
                waiting.append(following)

    def step(self, state: int, character: str) -> int:
        """The state after one more character. Cost: constant, averaged over a text."""
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def undecided(self, text: str) -> int:
        """Characters at the end of a text that may be the beginning of a mark.

        Args: text: from its beginning, or from where the last mark ended; holds no whole mark.
        """
        state = 0
        for character in text[max(0, len(text) - self._longest + 1) :]:
            state = self.step(state, character)
        return self.depth[state]
