"""Prompts of common words, and how many words they have.

Each word is one token (with its leading blank) in GPT-2's family of tokenizers and close to that in
others; what a server counted stands in the figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.errors import ConfigError

if TYPE_CHECKING:
    import random

MOST_TOKENS = 1_000_000  # of one length

_TEXT = """time year people way day man thing woman life child world school state family student
group country problem hand part place case week company system program question work government
number night point home water room mother area money story fact month lot right study book eye
job word business issue side kind head house service friend father power hour game line end
member law car city community name president team minute idea body information back parent face
level office door health person art war history party result change morning reason research girl
moment air teacher force education good new first last long great little own other old big high
small large next early young important few public bad same able go see come think look want give
use find tell ask work seem feel try leave call keep let begin help show hear play run move live
believe bring happen write provide sit stand lose pay meet include continue set learn lead watch
follow stop create speak read allow add spend grow open walk win offer remember love consider
river stone winter summer music paper table window garden forest ocean mountain bridge road
"""
WORDS = tuple(_TEXT.split())


def random_words(rng: random.Random, count: int) -> str:
    """About `count` tokens of text."""
    return " ".join(rng.choices(WORDS, k=count))


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts, all of at least 1.

    Args: text: "128" always 128, "64:256" uniform, both ends included, "~128" exponential with this
        mean, "lognormal:128:200" lognormal with this mean and this standard deviation.

    Raises: ConfigError: it is none of these.
    """

    text: str
    _parts: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        words = self.text.removeprefix("lognormal:").removeprefix("~").split(":")
        try:
            parts = tuple(int(word) for word in words)
        except ValueError:
            parts = ()
        if self.text.startswith("lognormal:"):
            right = len(parts) == 2
        elif self.text.startswith("~"):
            right = len(parts) == 1
        else:
            right = 1 <= len(parts) <= 2 and list(parts) == sorted(parts)
        if not right:
            raise ConfigError(
                f"{self.text!r}: must be N, LOW:HIGH with LOW at most HIGH, ~MEAN or"
                " lognormal:MEAN:SD"
            )
        if not 1 <= min(parts) <= max(parts) <= MOST_TOKENS:
            raise ConfigError(f"{self.text!r}: must be from 1 to {MOST_TOKENS:,} tokens")
        object.__setattr__(self, "_parts", parts)

    @property
    def mean(self) -> float:
        if self.text.startswith("lognormal:"):
            return self._parts[0]
        return (self._parts[0] + self._parts[-1]) / 2

    def draw(self, rng: random.Random) -> int:
        if self.text.startswith("lognormal:"):
            return max(1, round(self._lognormal(rng)))
        if self.text.startswith("~"):
            return max(1, round(rng.expovariate(1 / self._parts[0])))
        return rng.randint(self._parts[0], self._parts[-1])

    def _lognormal(self, rng: random.Random) -> float:
        """A draw with mean m and deviation s of the values themselves: sigma^2 = ln(1 + s^2 / m^2),
        mu = ln m - sigma^2 / 2."""
        mean, deviation = self._parts
        variance = math.log1p((deviation / mean) ** 2)
        return rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))
