"""What the server measures while it serves: latencies as clients meet them, errors, throughput.

What is counted has one ledger, the scheduler's; `exposition.py` shows both. Observing costs a
bisection per token, since the loop does it for every row of every step.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from runtime.request import Request
    from runtime.scheduling.statistics import SchedulerStatistics
    from server.generation.output import ChoiceOutput, RequestStream
    from server.generation.step_records import StepRecord

LATENCY_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25),
    *(0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
GAP_S = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 1.0),
)
THROUGHPUT_S = 1.0
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Histogram:
    """Counts per bucket; observing costs one bisection."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), as the exposition format wants them."""
        total, found = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            found.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
        return found


class Throughput:
    """Tokens per second over the last second or more in which tokens came without a pause."""

    __slots__ = ("_begin", "_last", "_tokens", "value")

    def __init__(self) -> None:
        self._begin = self._last = -math.inf
        self._tokens = 0
        self.value = 0.0

    def add(self, count: int, now: float) -> None:
        """So many tokens have come at `now`, in seconds of the engine's clock."""
        if now - self._last > THROUGHPUT_S:  # what came before the pause says nothing of now
            self._begin, self._tokens = now, 0
        else:
            self._tokens += count
        self._last = now
        if now - self._begin >= THROUGHPUT_S:
            self.value = self._tokens / (now - self._begin)
            self._begin, self._tokens = now, 0


@dataclass(slots=True)
class Metrics:
    """What the server sees beside the scheduler. Written by the engine and the HTTP layer.

    Args:
        statistics: asks the scheduler, when /metrics is read.
        waited_seconds: asks it how long a request has waited, by what it waited for.
        cache_info: what never changes about the KV pool, as labels.
        compat: servers all of whose names for these figures are told, too: vllm, sglang.
    """

    model_name: str
    statistics: Callable[[], SchedulerStatistics]
    waited_seconds: Callable[[Request], Mapping[str, float]]
    cache_info: Mapping[str, str]
    compat: Sequence[str] = ()

    rejected: dict[str, int] = field(default_factory=dict)  # by HTTP status
    connections: Callable[[], int] = lambda: 0
    held_bytes: Callable[[], tuple[int, int]] = lambda: (0, 0)  # of bodies, of unsent answers
    unread_tokens: Callable[[], int] = lambda: 0
    tasks: Callable[[], int] = lambda: 0
    loop_lag: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))
    loop_cpu: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))

    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))
    time_per_output_token: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))
    queue_time: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))
    wait_time: dict[str, Histogram] = field(default_factory=dict)  # by what was waited for
    request_latency: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))
    step_time: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))
    step_host_time: Histogram = field(default_factory=lambda: Histogram(GAP_S))
    device_idle: Histogram = field(default_factory=lambda: Histogram(GAP_S))
    compiled_kernels: int = 0
    request_prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    request_generation_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    prefill_time: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))
    decode_time: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))
    longest_choice_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    turn_hit_rate: Histogram = field(default_factory=lambda: Histogram(SHARES))
    throughput: Throughput = field(default_factory=Throughput)
    # Of requests some of whose choices have ended: how many, and the tokens of the longest.
    _ended: dict[RequestStream, tuple[int, int]] = field(default_factory=dict)

    def tokens(self, choice: ChoiceOutput, count: int, now: float) -> None:
        """A choice got `count` tokens at the moment `now`."""
        if not count:
            return
        self.throughput.add(count, now)
        timeline = choice.timeline
        last = timeline.last_token_s
        timeline.last_token_s = now
        if last is not None:
            self.inter_token_latency.observe((now - last) / count)
            return
        timeline.first_token_s = now
        self.time_to_first_token.observe(now - timeline.arrival_s)
        waited = self.waited_seconds(choice.request)
        timeline.queued_s = sum(waited.values())
        self.queue_time.observe(timeline.queued_s)
        self.prefill_time.observe(max(0.0, now - timeline.arrival_s - timeline.queued_s))
        for term, seconds in waited.items():
            self.wait_time.setdefault(term, Histogram(LATENCY_S)).observe(seconds)

    def finished(self, choice: ChoiceOutput, now: float) -> None:
        """A choice has ended, in whatever way; every submitted one does so exactly once."""
        timeline = choice.timeline
        self.request_latency.observe(now - timeline.arrival_s)
        self.request_prompt_tokens.observe(len(choice.request.input_ids))
        self.request_generation_tokens.observe(choice.completion_tokens)
        first, last, count = timeline.first_token_s, timeline.last_token_s, timeline.tokens
        if first is not None and last is not None:
            self.decode_time.observe(last - first)
            if count > 1:
                self.time_per_output_token.observe((last - first) / (count - 1))
        ended, longest = self._ended.pop(choice.stream, (0, 0))
        ended, longest = ended + 1, max(longest, count)
        if ended < len(choice.stream.requests):
            self._ended[choice.stream] = ended, longest
        else:
            self.longest_choice_tokens.observe(longest)

    def step(self, record: StepRecord) -> None:
        """A step was committed, or has failed."""
        self.step_time.observe(record.done_s - record.launched_s)
        self.step_host_time.observe(record.host_s)
        self.compiled_kernels += record.compiled_kernels
        if record.idle_s is not None:
            self.device_idle.observe(record.idle_s)

    def turn(self, hit_rate: float) -> None:
        """A conversation went on, and so much of its prompt was found in the prefix cache."""
        self.turn_hit_rate.observe(hit_rate)

    def loop_beat(self, late_s: float, cpu_s: float) -> None:
        """A beat of the event loop came late; its thread has worked since the last one."""
        self.loop_lag.observe(late_s)
        self.loop_cpu.observe(cpu_s)

    def refused(self, status: int) -> None:
        """A request was answered with an error status."""
        self.rejected[str(status)] = self.rejected.get(str(status), 0) + 1
