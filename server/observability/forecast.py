"""When a waiting request can expect to start: the queue played forward at the pace of late.

An estimate for people who watch, never used to decide anything. It takes fcfs for granted, a prompt
after the other, and answers as long as answers have been on average.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from runtime.scheduling.glance import Holder


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast it has been going.

    Args:
        prompt_tokens_s: prompt tokens computed per second of steps that compute any.
        step_s: seconds from one token of a stream to its next.
        output_tokens: mean length of an answer; None: none has ended yet.
    """

    prompt_tokens_s: float
    step_s: float
    output_tokens: float | None

    def left(self, done: int, most: int) -> float:
        """Tokens that an answer is still expected to get. One that is longer than the mean already
        may go on for as long again."""
        if self.output_tokens is None:
            return float(most - done)
        mean = self.output_tokens
        return min(most - done, mean - done if done < mean else mean)


class Waiting(NamedTuple):
    """Args: prompt_tokens: to be computed. max_new_tokens: that it may have."""

    prompt_tokens: int
    max_new_tokens: int


def expected_starts(
    waiting: Iterable[Waiting],
    holders: Sequence[Holder],
    rates: Rates,
    *,
    free_rows: int,
    free_tokens: int,
) -> list[float]:
    """Seconds from now until each waiting request's first chunk, in the order of the queue.

    Args: free_tokens: of KV, what can be evicted included.
    """
    prefill_end = 0.0
    ends: list[tuple[float, int]] = []  # (when, KV tokens that it gives back)
    for one in holders:
        prefill_end += one.prefill_left / rates.prompt_tokens_s
        left = rates.left(one.output_tokens, one.max_new_tokens)
        begins = prefill_end if one.prefill_left else 0.0
        ends.append((begins + left * rates.step_s, one.kv_tokens))
    heapify(ends)
    starts = []
    for request in waiting:
        outputs = rates.left(0, request.max_new_tokens)
        need = round(request.prompt_tokens + outputs)
        start = prefill_end
        while ends and (ends[0][0] <= start or free_rows < 1 or free_tokens < need):
            when, given_back = heappop(ends)
            start = max(start, when)
            free_rows += 1
            free_tokens += given_back
        starts.append(start)
        prefill_end = start + request.prompt_tokens / rates.prompt_tokens_s
        heappush(ends, (prefill_end + outputs * rates.step_s, need))
        free_rows -= 1
        free_tokens -= need
    return starts
