"""The records that workloads are made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """What a client says, and how many tokens it wants for an answer.

    Args: tokens: that the text is thought to have; 0: not known.
    """

    text: str
    max_tokens: int
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that wait for one another.

    Args: start_s: when the first is asked, where a file says so.
    """

    turns: tuple[Turn, ...]
    start_s: float | None = None

    @property
    def tokens(self) -> int:
        """The tokens of the last prompt and its answer together, as far as they are known."""
        return sum(turn.tokens + turn.max_tokens for turn in self.turns)
