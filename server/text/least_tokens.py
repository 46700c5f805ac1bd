"""How few tokens a text can be, found without tokenizing it: what cannot fit is refused at once.

A token of n bytes has 1/n of itself in each of them. A byte's longest token is at least as long as
whichever it ends up in, so the sum of 1/longest over a text's bytes is at most its tokens. For
prose that is a fifth of them; for digits that are tokens of their own, all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

_SLICE = 65_536


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """Tokens that a text may have. Args: told: the limit, as the beginning of a sentence."""

    tokens: int
    told: str


class LeastTokens:
    """A lower bound of the tokens of a text.

    Args:
        tokens: the vocabulary as bytes; None: as characters, whose number is all that is known.
        longest: characters of the longest token.
        ascii_only: the tokenizer composes other characters, so these have no bound by bytes.
    """

    def __init__(
        self, tokens: Iterable[bytes] | None, *, longest: int, ascii_only: bool = False
    ) -> None:
        self._longest = max(1, longest)
        self._ascii_only = ascii_only
        self._weights = None if tokens is None else _weights(tokens)

    def exceed(self, text: str, most: int) -> bool:
        """Whether a text is certainly more than `most` tokens. Cost: 2 ns a byte at most."""
        if self._weights is None or (self._ascii_only and not text.isascii()):
            return len(text) > most * self._longest
        least = 0.0
        for begin in range(0, len(text), _SLICE):
            piece = text[begin : begin + _SLICE].encode("utf-8", "replace")
            counts = np.bincount(np.frombuffer(piece, np.uint8), minlength=256)
            least += float(counts @ self._weights)
            if least > most + 1:  # beyond what rounding may do
                return True
        return False


def _weights(tokens: Iterable[bytes]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    longest = [1] * 256
    for token in tokens:
        for byte in set(token):
            longest[byte] = max(longest[byte], len(token))
    return 1.0 / np.array(longest)
