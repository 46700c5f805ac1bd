"""Requests to simulate: made from a seed, or read from a file of lengths."""

from __future__ import annotations

import json
import math
import random
from array import array
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from runtime.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from runtime.request import PromptPin

# Ends a simulated request: a token id that no vocabulary reaches, since a recorded trace brings
# the ids of its own.
EOS_TOKEN_ID = 2**31 - 1

Span = tuple[int, int]  # smallest and largest value, both included


@dataclass(slots=True)
class Arrival:
    """A request before anybody has seen it.

    Args:
        arrival_s: seconds since the start of the simulation.
        output_tokens: tokens that the model gives before it ends the request by itself.
        max_new_tokens: what the client asks for. Above output_tokens the request ends by a stop,
            and the scheduler must plan with an upper bound, as it does for most real traffic.
            None: whatever fits.
        abort_after_s: the client leaves that long after it came; None: it stays.
        output_ids: the tokens themselves, where known (a later prompt may quote them).
        pins: what of the prompt is to stay cached.
    """

    arrival_s: float
    input_ids: array[int]
    output_tokens: int
    max_new_tokens: int | None
    request_id: str
    priority: int = 0
    namespace: str = ""
    ignore_eos: bool = False
    abort_after_s: float | None = None
    output_ids: array[int] | None = None
    pins: tuple[PromptPin, ...] = ()

    @property
    def ends_itself(self) -> bool:
        return self.max_new_tokens is None or self.max_new_tokens > self.output_tokens


@dataclass(slots=True)
class Workload:
    """Makes arrivals; everything random comes from the seed.

    Args:
        requests: how many.
        rate: arrivals a second (Poisson, or between bursts); 0: all at once.
        burst: requests that arrive together.
        input_tokens, output_tokens: uniform in these spans.
        prefix_groups, prefix_tokens: each request starts with one of that many common prefixes of
            that length, before its own input_tokens. 0 groups: nothing is shared.
        cold_share: share of the requests that do without a common prefix.
        max_new_factor: max_new_tokens as a multiple of the true output length; 1: exact.
    """

    requests: int
    rate: float = 0.0
    burst: int = 1
    input_tokens: Span = (100, 1024)
    output_tokens: Span = (100, 1024)
    prefix_groups: int = 0
    prefix_tokens: int = 0
    cold_share: float = 0.0
    max_new_factor: float = 1.0
    seed: int = 0
    _random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check()

    def arrivals(self) -> list[Arrival]:
        """The requests in order of arrival; the same ones at every call."""
        self._random = random.Random(self.seed)
        prefixes = [self._tokens(self.prefix_tokens) for _ in range(self.prefix_groups)]
        made = []
        for index, arrival_s in enumerate(self._times()):
            output = self._random.randint(*self.output_tokens)
            made.append(
                Arrival(
                    arrival_s=arrival_s,
                    input_ids=self._prompt(prefixes),
                    output_tokens=output,
                    max_new_tokens=max(output, round(output * self.max_new_factor)),
                    request_id=f"r{index}",
                )
            )
        return made

    def _times(self) -> Iterator[float]:
        bursts = -(-self.requests // self.burst)
        # Whole nanoseconds: the last bit of a logarithm is the C library's own.
        gaps = (
            round(self._random.expovariate(self.rate), 9) if self.rate else 0.0
            for _ in range(bursts)
        )
        times = [time_s for time_s in accumulate(gaps) for _ in range(self.burst)]
        return iter(times[: self.requests])

    def _prompt(self, prefixes: list[array[int]]) -> array[int]:
        own = self._tokens(self._random.randint(*self.input_tokens))
        if not prefixes or self._random.random() < self.cold_share:
            return own
        return self._random.choice(prefixes) + own

    def _tokens(self, count: int) -> array[int]:
        return _random_tokens(self._random, count)

    def _check(self) -> None:
        for name, span in (
            ("input_tokens", self.input_tokens),
            ("output_tokens", self.output_tokens),
        ):
            if not 1 <= span[0] <= span[1]:
                raise ConfigError(f"{name} {span}: must be two counts from 1 on, smaller first")
        for name in ("requests", "burst"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)}: must be at least 1")
        if not 0 <= self.rate < math.inf:
            raise ConfigError(f"rate {self.rate}: must be positive, or 0 for all at once")
        if not 1 <= self.max_new_factor < math.inf:
            raise ConfigError(f"max_new_factor {self.max_new_factor}: must be at least 1")
        if not 0 <= self.cold_share <= 1:
            raise ConfigError(f"cold_share {self.cold_share}: must be from 0 to 1")
        for name in ("prefix_groups", "prefix_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} {getattr(self, name)}: must be at least 0")


def read_length_trace(path: Path, *, seed: int = 0) -> list[Arrival]:
    """Arrivals from a file of JSON lines, in order of arrival.

    Each line holds `arrival_s`, `input_tokens`, `output_tokens`, and may hold `max_new_tokens`,
    `priority`, `namespace`, and `prefix` with `prefix_tokens`: prompts of one `prefix` (any string)
    start with the same prefix_tokens tokens, which count as part of input_tokens.

    Raises: ConfigError: names the line and the field that is wrong."""
    prompts = _Prompts(seed)
    arrivals: list[Arrival] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                arrivals.append(_read_line(line, f"{path}:{number}", len(arrivals), prompts))
    if not arrivals:
        raise ConfigError(f"{path}: holds no requests")
    return in_order(arrivals)


def in_order(arrivals: Iterable[Arrival]) -> list[Arrival]:
    """Sorted by time, stable."""
    return sorted(arrivals, key=lambda arrival: arrival.arrival_s)


class _Prompts:
    """Random prompts that share the prefixes they are said to share."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._prefixes: dict[str, array[int]] = {}

    def make(self, tokens: int, prefix: str | None, prefix_tokens: int) -> array[int]:
        if prefix is None:
            return self._draw(tokens)
        known = self._prefixes.setdefault(prefix, array("i"))
        known.extend(self._draw(max(0, prefix_tokens - len(known))))
        return known[:prefix_tokens] + self._draw(tokens - prefix_tokens)

    def _draw(self, count: int) -> array[int]:
        return _random_tokens(self._random, count)


def _random_tokens(generator: random.Random, count: int) -> array[int]:
    # Raw 16-bit ids: six times as fast as a call of randint for each.
    return array("i", array("H", generator.randbytes(2 * count)))


def _read_line(line: str, where: str, index: int, prompts: _Prompts) -> Arrival:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must be an object, is {type(entry).__name__}")
    arrival_s = entry.get("arrival_s")
    if isinstance(arrival_s, bool) or not isinstance(arrival_s, int | float) or arrival_s < 0:
        raise ConfigError(f"{where}: arrival_s {arrival_s!r}: must be seconds from 0 on")
    inputs = _integer(entry, "input_tokens", where)
    outputs = _integer(entry, "output_tokens", where)
    prefix = entry.get("prefix")
    shared = _integer(entry, "prefix_tokens", where) if prefix is not None else 0
    if shared > inputs:
        raise ConfigError(f"{where}: prefix_tokens {shared}: more than input_tokens {inputs}")
    return Arrival(
        arrival_s=float(arrival_s),
        input_ids=prompts.make(inputs, None if prefix is None else str(prefix), shared),
        output_tokens=outputs,
        max_new_tokens=_integer(entry, "max_new_tokens", where, default=outputs),
        request_id=str(entry.get("request_id", f"r{index}")),
        priority=_integer(entry, "priority", where, default=0, minimum=None),
        namespace=str(entry.get("namespace", "")),
    )


def _integer(
    entry: dict[str, Any],
    name: str,
    where: str,
    *,
    default: int | None = None,
    minimum: int | None = 1,
) -> int:
    value = entry.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{where}: {name} {value!r}: must be a whole number")
    if minimum is not None and value < minimum:
        raise ConfigError(f"{where}: {name} {value}: must be at least {minimum}")
    return value
