"""Words that must not be said, as sequences of token ids whose last one is never allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable

    from numpy.typing import NDArray

TokenIds = tuple[int, ...]


class BadWords:
    """Which tokens would complete a bad word. Shared by the choices of a request.

    Args: words: the token ids of each, none empty.
    """

    def __init__(self, words: Iterable[TokenIds]) -> None:
        self._always: list[int] = []
        self._after: dict[int, list[tuple[TokenIds, int]]] = {}  # by the last token before
        for word in words:
            head, token = word[:-1], word[-1]
            if head:
                self._after.setdefault(head[-1], []).append((head, token))
            else:
                self._always.append(token)

    def completing(self, output_ids: array[int]) -> NDArray[np.int64]:
        """Tokens that would complete a word after this output. Cost: grows only with the words
        that go on from its last token, and those of one token."""
        found = self._always
        if output_ids:
            found = found + [
                token
                for head, token in self._after.get(output_ids[-1], ())
                if tuple(output_ids[-len(head) :]) == head
            ]
        return np.array(found, dtype=np.int64)
