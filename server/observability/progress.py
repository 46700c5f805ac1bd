"""How far a request is that has no token yet, for a client that asked to be told.

Estimates are those of the live view: the queue played forward at the pace of late (forecast.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from server.observability.forecast import Rates, Waiting, expected_starts
from server.observability.live import RATE_STEPS, mean_output, rates_of, step_figures

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from runtime.request import Request
    from runtime.scheduling.glance import Glance
    from server.generation.engine import Engine
    from server.generation.generator import Generation

MOST_REQUESTS = 256  # of the queue that are looked at, and of those that run
KEPT_S = 0.25  # all who ask within so long are told of the same moment


@dataclass(frozen=True, slots=True)
class Standing:
    """What a client is told.

    Args:
        queue_position: from 1; 0: none of it waits; None: far behind, or its grammar is compiled.
        prefilled_tokens: of the prompt, computed or found in the cache.
        expected_first_token_s: seconds from now; None: nobody can tell.
    """

    queue_position: int | None
    prompt_tokens: int
    prefilled_tokens: int
    expected_first_token_s: float | None


@dataclass(slots=True)
class _Moment:
    """The queue at one time. Both by request id; expected: seconds to the first token."""

    positions: dict[str, int] = field(default_factory=dict)
    expected: dict[str, float] = field(default_factory=dict)


class Progress:
    """Knows how far requests are; costs nothing while nobody asks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._moment = _Moment()
        self._taken_s = float("-inf")

    def of(self, generation: Generation) -> Standing:
        """How far a request is, all its prompts taken together."""
        now = self._engine.clock()
        requests = generation.requests[:: generation.params.best_of]
        # Who came later is not in it.
        newest = max(request.arrival_s for request in requests)
        if now - self._taken_s >= KEPT_S or newest >= self._taken_s:
            self._moment, self._taken_s = self._take(), now
        positions = [self._position(request) for request in requests]
        expected = [self._moment.expected.get(one.request_id) for one in requests]
        known = [seconds for seconds in expected if seconds is not None]
        return Standing(
            queue_position=None
            if None in positions
            else max(p for p in positions if p is not None),
            prompt_tokens=sum(len(request.input_ids) for request in requests),
            prefilled_tokens=sum(min(one.length, len(one.input_ids)) for one in requests),
            expected_first_token_s=round(max(known), 3) if len(known) == len(expected) else None,
        )

    def _position(self, request: Request) -> int | None:
        return 0 if request.row >= 0 else self._moment.positions.get(request.request_id)

    def _take(self) -> _Moment:
        engine = self._engine
        glance = engine.scheduler.glance(MOST_REQUESTS, 0)
        moment = _Moment({one.request_id: place for place, one in enumerate(glance.waiting, 1)})
        figures = step_figures(engine.records.last(RATE_STEPS + 1))
        output_tokens = mean_output(engine)
        rates = rates_of(figures, output_tokens) or _rates_of_prompts(figures, output_tokens)
        if rates is not None:
            moment.expected = self._expected(glance, rates)
        return moment

    def _expected(self, glance: Glance, rates: Rates) -> dict[str, float]:
        now = self._engine.scheduler.statistics()
        found: dict[str, float] = {}
        left = 0
        for one, holder in zip(glance.admitted, glance.holders, strict=False):
            left += holder.prefill_left
            found[one.request_id] = left / rates.prompt_tokens_s
        waiting = [
            Waiting(one.input_tokens + one.output_tokens, one.max_new_tokens)
            for one in glance.waiting
        ]
        starts = expected_starts(
            waiting,
            glance.holders,
            rates,
            free_rows=now.free_rows,
            free_tokens=now.free_tokens + now.evictable_tokens,
        )
        for one, prompt, start in zip(glance.waiting, waiting, starts, strict=True):
            found[one.request_id] = start + prompt.prompt_tokens / rates.prompt_tokens_s
        return found


def _rates_of_prompts(
    figures: Sequence[dict[str, Any]], output_tokens: float | None
) -> Rates | None:
    """The pace of steps in which nobody decodes, as a long prompt's may be: answers are taken to
    get a token in each. None: they computed no prompt."""
    steps = [one for one in figures if one["prefill_tokens"]]
    seconds = sum(one["step_ms"] + one["gap_ms"] for one in steps) / 1e3
    if not steps or seconds <= 0:
        return None
    tokens = sum(one["prefill_tokens"] for one in steps)
    return Rates(tokens / seconds, seconds / len(steps), output_tokens)
