"""What is asked: conversations of one turn or several, made from a seed or read from a file."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from runtime.errors import ConfigError
from server.bench.trace_files import READERS, TIMED
from server.bench.turns import Conversation, Turn
from server.bench.words import Lengths, random_words

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MOST_REQUESTS = 1_000_000
MOST_WORDS = 100_000_000  # of all prompts that are made, which are in memory together

MADE = ("random", "shared-prefix", "multi-turn")
KINDS = (*MADE, *READERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A workload. Another seed gives other words, so it meets no cache that is warm from this one.

    Args:
        kind: "random": prompts of random words. "shared-prefix": each prompt begins with one of
            `prefix_groups` texts of `prefix_tokens` words, its own words follow. "multi-turn":
            conversations of `turns` turns, each on top of all before it, answers included. Else a
            format of `file`.
        requests: at most.
        prompt, output: words of each prompt (of a turn, behind a prefix) and its max_tokens.
        context_length: requests of a file that are longer are left out; 0: none is.
        speed: times in a file pass so many times as fast.

    Raises: ConfigError
    """

    kind: str = "random"
    requests: int = 100
    prompt: Lengths
    output: Lengths
    prefix_tokens: int = 1024
    prefix_groups: int = 1
    turns: int = 4
    file: Path | None = None
    context_length: int = 0
    speed: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"--workload {self.kind}: must be one of {', '.join(KINDS)}")
        if (self.file is not None) != (self.kind in READERS):
            raise ConfigError(f"--file: goes with --workload {', '.join(READERS)}, which need it")
        for name in ("requests", "prefix_tokens", "prefix_groups", "turns", "speed"):
            if not getattr(self, name) > 0:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} {getattr(self, name):g}: must be above 0")
        if self.requests > MOST_REQUESTS:
            raise ConfigError(f"--requests {self.requests}: must be at most {MOST_REQUESTS:,}")
        words = self._words()
        if words > MOST_WORDS:
            raise ConfigError(
                f"--requests {self.requests} with --prompt-tokens {self.prompt.text} make about"
                f" {words:,.0f} words; at most {MOST_WORDS:,}"
            )
        if self.context_length < 0:
            raise ConfigError(f"--context-length {self.context_length}: must be at least 0")

    def _words(self) -> float:
        """About how many it makes."""
        if self.file is not None:
            return 0
        shared = self.kind == "shared-prefix"
        behind = self.prefix_tokens if shared else 0
        prefixes = self.prefix_tokens * self.prefix_groups if shared else 0
        return prefixes + self.requests * (behind + self.prompt.mean)

    @property
    def timed(self) -> bool:
        """Its file says when each request came."""
        return self.kind in TIMED

    def conversations(self, seed: int) -> list[Conversation]:
        """In order of arrival; the same ones for the same seed. Raises: ConfigError: the file."""
        rng = random.Random(f"workload/{seed}")
        if self.file is not None:
            found = READERS[self.kind](self.file, self.turns, seed)
            fitting = (one for one in found if self._fits(one))
            read = [self._timed(one) for one in _bounded(fitting, self.requests)]
            if not read:
                raise ConfigError(f"{self.file}: no request that fits")
            return read
        if self.kind == "multi-turn":
            made = (self._conversation(rng, self.turns) for _ in range(self.requests))
            return list(_bounded(made, self.requests))
        prefixes = [""]
        if self.kind == "shared-prefix":
            prefixes = [
                random_words(rng, self.prefix_tokens) + " " for _ in range(self.prefix_groups)
            ]
        return [self._conversation(rng, 1, rng.choice(prefixes)) for _ in range(self.requests)]

    def _conversation(self, rng: random.Random, turns: int, prefix: str = "") -> Conversation:
        made = []
        for _ in range(turns):
            text = prefix + random_words(rng, self.prompt.draw(rng))
            made.append(Turn(text, self.output.draw(rng)))
        return Conversation(tuple(made))

    def _fits(self, conversation: Conversation) -> bool:
        return not self.context_length or conversation.tokens <= self.context_length

    def _timed(self, conversation: Conversation) -> Conversation:
        if conversation.start_s is None:
            return conversation
        return replace(conversation, start_s=conversation.start_s / self.speed)


def _bounded(conversations: Iterator[Conversation], requests: int) -> Iterator[Conversation]:
    """The first ones, of so many turns together; the last is cut short where it must."""
    left = requests
    for one in conversations:
        turns = tuple(islice(one.turns, left))
        left -= len(turns)
        yield one if len(turns) == len(one.turns) else replace(one, turns=turns)
        if not left:
            return
