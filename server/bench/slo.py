"""What users call good enough, and which answers were."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.bench.answer import Answer

MEASURES = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper bounds that one answer must keep, all of them.

    Args: limits: (measure, seconds); of "itl" the answer's largest gap counts.
    """

    limits: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, text: str) -> Slo:
        """The bounds in a text like "ttft=200,tpot=50", in milliseconds. Raises: ConfigError."""
        limits = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            try:
                limit = float(value)
            except ValueError:
                limit = math.nan
            if name not in MEASURES or not 0 < limit < math.inf:
                wanted = ", ".join(f"{measure}=MS" for measure in MEASURES)
                raise ConfigError(f"--slo {part!r}: must be of {wanted}, each above 0")
            limits[name] = limit / 1e3
        return cls(tuple(limits.items()))

    def __str__(self) -> str:
        return ",".join(f"{name}={limit * 1e3:g}" for name, limit in self.limits)

    def met_by(self, answer: Answer) -> bool | None:
        """None: the run ended before it was decided. A failed answer has not met it."""
        if answer.error is not None:
            return False
        if any(_so_far(answer, name) > limit for name, limit in self.limits):
            return False
        return None if answer.cut else True

    def judge(self, answers: Sequence[Answer]) -> tuple[int, int]:
        """How many have met it, and of how many this is decided."""
        known = [met for answer in answers if (met := self.met_by(answer)) is not None]
        return sum(known), len(known)


def _so_far(answer: Answer, measure: str) -> float:
    """A measure of an answer; of one that was cut, what it came to at least."""
    if measure == "e2e":
        return answer.e2e
    if measure == "ttft":
        return answer.ttft if answer.times else answer.e2e
    if measure == "itl":
        gaps = (
            [*answer.gaps, answer.end - answer.times[-1]] if answer.cut and answer.times else None
        )
        return max(answer.gaps if gaps is None else gaps, default=0.0)
    return 0.0 if answer.cut else answer.tpot or 0.0
