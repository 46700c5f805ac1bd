"""TargetReach: whether --tpot-slo-ms is within reach, by a sequential test over measured steps."""

from __future__ import annotations

import math

FEW_MISSES = 0.05  # a target that this share of the steps misses is held
MANY_MISSES = 0.20  # one that this share misses is not
CONFIDENCE = 0.99

_MISSED = math.log(MANY_MISSES / FEW_MISSES)
_HELD = math.log((1 - MANY_MISSES) / (1 - FEW_MISSES))
_CERTAIN = math.log(CONFIDENCE / (1 - CONFIDENCE))


class TargetReach:
    """Says of a stream of held and missed steps whether the target can be held.

    Each step tells for or against one of two readings: that 5 % of the steps miss the target, or
    that 20 % do. Their log-likelihood ratio is added up and kept within the bounds at which one of
    them is 99 times as likely as the other (Wald's sequential test, 1945, without an end):

    - confidence: nothing is said before a bound is reached, and the answer changes only when the
      other bound is. Three misses out of sixty-four change nothing, whichever three they are.
    - hysteresis: between the bounds lies the whole band, so an answer that has just changed needs
      as much to change back: 7 misses in a row, or 54 steps without one. Where between 5 and 20 %
      of the steps miss, the answer may stay what it was, and it hardly ever flickers.
    """

    def __init__(self) -> None:
        self._score = 0.0  # towards many misses
        self.within: bool | None = None  # None: not known yet

    def observe(self, *, held: bool) -> None:
        """Takes one more step into account."""
        score = self._score + (_HELD if held else _MISSED)
        self._score = min(max(score, -_CERTAIN), _CERTAIN)
        if abs(self._score) >= _CERTAIN:
            self.within = self._score < 0
