"""Which row of the rotary tables a token takes, in ints.

Two rotary types (dynamic, longrope) have other frequencies for longer sequences. A token's are
those for max(prompt, p + 1) tokens, p its position: a prompt is computed knowing its whole length,
and what is generated knows what came before it, as in transformers with its cache. So a row p of a
table is for a sequence of p + 1 tokens, which is right for every generated token and for every
prompt that is not long; only the tokens of long prompts need rows of their own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LongPrompts:
    """Prompts whose frequencies differ from those of shorter ones.

    Args:
        above: those of more tokens than this.
        by_length: each length has its own frequencies (dynamic); else all have the same
            (longrope).
    """

    above: int
    by_length: bool

    def namespace(self, salt: str, prompt_tokens: int) -> str:
        """Where a prompt may find cached KV: among those of its salt and its frequencies."""
        group = 0
        if prompt_tokens > self.above:
            group = prompt_tokens if self.by_length else 1
        return f"{group}:{salt}"


@dataclass(frozen=True, slots=True)
class RopeLayout:
    """The rows of all rotary tables of a model.

    Row p < context is for position p of a sequence of p + 1 tokens. Behind them stand the rows of
    long prompts: by position p < above; or, where each length has its own, those of one step's
    tokens, written before it.

    Args:
        context: tokens of the longest sequence that is served.
        long_prompts: None: there are none.
        step_tokens: prompt tokens of a step at most.
    """

    context: int
    long_prompts: LongPrompts | None = None
    step_tokens: int = 0
