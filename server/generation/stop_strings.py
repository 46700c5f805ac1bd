"""Stop strings in text that comes in pieces, in time that does not depend on how many there are.

The automaton of Aho and Corasick (Efficient string matching, CACM 18(6), 1975). Its state is the
longest end of the text that begins a stop, so its depth is also how much text is undecided.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from runtime.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

# Building takes 1 to 2 us a character, on the event loop.
MAX_CHARACTERS = 8192


class StopStrings:
    """The automaton of a set of stop strings. State 0 is the empty beginning.

    Attributes:
        depth: characters of the beginning that a state stands for.
        stop_length: characters of the longest stop that a state's beginning ends with, or 0.

    Raises: InvalidRequest: together they are longer than `MAX_CHARACTERS`.
    """

    __slots__ = ("_fallback", "_next", "depth", "stop_length")

    def __init__(self, stops: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]  # the longest end of a state's beginning that is a beginning too
        self.depth = [0]
        self.stop_length = [0]
        stops = dict.fromkeys(stops)
        total = sum(map(len, stops))
        if total > MAX_CHARACTERS:
            raise InvalidRequest(
                f"stop: has {total} characters in all; at most {MAX_CHARACTERS} are allowed",
                param="stop",
            )
        for stop in stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self._fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.stop_length.append(0)
            state = following
        self.stop_length[state] = len(stop)

    def _link(self) -> None:
        """Sets the fallbacks, shorter beginnings first."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            self.stop_length[state] = (
                self.stop_length[state] or self.stop_length[self._fallback[state]]
            )
            for character, following in self._next[state].items():
                self._fallback[following] = self.step(self._fallback[state], character)
                waiting.append(following)

    def step(self, state: int, character: str) -> int:
        """The state after one more character. Cost: constant, averaged over a text."""
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)
