"""When requests arrive that do not wait for one another.

Whatever the server does, the times stay: a slow server meets the same load as a fast one.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from runtime.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = ("poisson", "constant", "burst", "ramp")


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An arrival process.

    Args:
        kind: "poisson": independent arrivals. "constant": one every 1 / rate seconds. "burst":
            burst_size at once, every burst_size / rate seconds. "ramp": Poisson arrivals whose rate
            grows (or falls) evenly from `rate` to `ramp_to` while the requests arrive.
        rate: requests a second.

    Raises: ConfigError
    """

    kind: str
    rate: float
    burst_size: int = 8
    ramp_to: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"--arrivals {self.kind}: must be one of {', '.join(KINDS)}")
        if not 0 < self.rate < math.inf:
            raise ConfigError(f"--rate {self.rate:g}: must be above 0")
        if self.burst_size < 1:
            raise ConfigError(f"--burst-size {self.burst_size}: must be at least 1")
        if (self.kind == "ramp") != (self.ramp_to is not None):
            raise ConfigError("--ramp-to: goes with --arrivals ramp, which needs it")
        if self.ramp_to is not None and not 0 < self.ramp_to < math.inf:
            raise ConfigError(f"--ramp-to {self.ramp_to:g}: must be above 0")

    def times(self, requests: int, seed: int) -> Iterator[float]:
        """Seconds from the start, in order, without end. requests: over how many a ramp goes."""
        if self.kind == "constant":
            return (index / self.rate for index in count())
        if self.kind == "burst":
            size = self.burst_size
            return (index // size * size / self.rate for index in count())
        poisson = _unit_poisson(random.Random(f"arrivals/{seed}"))
        if self.kind == "poisson":
            return (expected / self.rate for expected in poisson)
        return (self._ramped(expected, requests) for expected in poisson)

    def _ramped(self, expected: float, requests: int) -> float:
        """The time by which `expected` requests are expected. The rate is r + s t until the ramp
        ends at T = 2 n / (r + r'), so r t + s t^2 / 2 are; beyond it the rate stays r'."""
        assert self.ramp_to is not None
        ramp_s = 2 * requests / (self.rate + self.ramp_to)
        if expected >= requests:
            return ramp_s + (expected - requests) / self.ramp_to
        slope = (self.ramp_to - self.rate) / ramp_s
        # The root that also holds for a slope of 0.
        return 2 * expected / (self.rate + math.sqrt(self.rate**2 + 2 * slope * expected))


def _unit_poisson(rng: random.Random) -> Iterator[float]:
    """The arrivals of a Poisson process of rate 1; a time of it is also how many are expected."""
    now = 0.0
    while True:
        now += rng.expovariate(1.0)
        yield now
