"""What /metrics shows, rendered through prometheus_client when asked.

What is counted has one ledger, the scheduler's, whose statistics are read here. What only the
server sees is kept here: latencies as clients meet them, and error answers. Observing costs a
bisection per token, since the loop does it for every row of every step.

Figures appear under the names of vLLM and of SGLang at once, so that dashboards made for either
show this server; what only loomserve knows is named `loomserve:`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from runtime.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from runtime.request import Request
    from runtime.scheduling.statistics import SchedulerStatistics
    from runtime.step_records import StepRecord
    from server.generation.output import ChoiceOutput, RequestStream

LATENCY_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25),
    *(0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
THROUGHPUT_S = 1.0
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
    """

    model_name: str
    statistics: Callable[[], SchedulerStatistics]
    waited_seconds: Callable[[Request], Mapping[str, float]]
    cache_info: Mapping[str, str]

    rejected: dict[str, int] = field(default_factory=dict)  # by HTTP status
    connections: Callable[[], int] = lambda: 0
    loop_lag: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))
    loop_cpu: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))

    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))
    time_per_output_token: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))
    queue_time: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))
    wait_time: dict[str, Histogram] = field(default_factory=dict)  # by what was waited for
    request_latency: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))
    step_time: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))
    request_prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    request_generation_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    prefill_time: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))
    decode_time: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))
    longest_choice_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    throughput: Throughput = field(default_factory=Throughput)
    # Of requests some of whose choices have ended: how many, and the tokens of the longest.
    _ended: dict[RequestStream, tuple[int, int]] = field(default_factory=dict)

    def tokens(self, choice: ChoiceOutput, count: int, now: float) -> None:
        """A choice got `count` tokens at the moment `now`."""
        if not count:
            return
        self.throughput.add(count, now)
        last = choice.last_token_s
        choice.last_token_s = now
        if last is not None:
            self.inter_token_latency.observe((now - last) / count)
            return
        choice.first_token_s = now
        request = choice.request
        self.time_to_first_token.observe(now - choice.arrival_s)
        waited = self.waited_seconds(request)
        queued = sum(waited.values())
        self.queue_time.observe(queued)
        self.prefill_time.observe(max(0.0, now - choice.arrival_s - queued))
        for term, seconds in waited.items():
            self.wait_time.setdefault(term, Histogram(LATENCY_S)).observe(seconds)

    def finished(self, choice: ChoiceOutput, now: float) -> None:
        """A choice has ended, in whatever way; every submitted one does so exactly once."""
        self.request_latency.observe(now - choice.arrival_s)
        self.request_prompt_tokens.observe(len(choice.request.input_ids))
        self.request_generation_tokens.observe(choice.completion_tokens)
        first, count = choice.first_token_s, choice.completion_tokens
        if first is not None and choice.last_token_s is not None:
            self.decode_time.observe(choice.last_token_s - first)
            if count > 1:
                self.time_per_output_token.observe((choice.last_token_s - first) / (count - 1))
        ended, longest = self._ended.pop(choice.stream, (0, 0))
        ended, longest = ended + 1, max(longest, count)
        if ended < len(choice.stream.requests):
            self._ended[choice.stream] = ended, longest
        else:
            self.longest_choice_tokens.observe(longest)

    def step(self, record: StepRecord) -> None:
        """A step was committed, or has failed."""
        self.step_time.observe(record.done_s - record.launched_s)

    def loop_beat(self, late_s: float, cpu_s: float) -> None:
        """A beat of the event loop came late; its thread has worked since the last one."""
        self.loop_lag.observe(late_s)
        self.loop_cpu.observe(cpu_s)

    def refused(self, status: int) -> None:
        """A request was answered with an error status."""
        self.rejected[str(status)] = self.rejected.get(str(status), 0) + 1

    def render(self) -> bytes:
        """The exposition text."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Snapshot(self))  # type: ignore[arg-type]
        return generate_latest(registry)


class _Snapshot:
    """The metric families of one scrape; a prometheus_client collector."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._label = metrics.model_name

    def collect(self) -> Iterator[Metric]:
        now = self._metrics.statistics()
        yield from self._gauges(now)
        yield self._cache_info()
        yield from self._counters(now)
        yield from self._labelled_counters(now)
        yield from self._histograms()

    def _gauges(self, s: SchedulerStatistics) -> Iterator[Metric]:
        c = s.counters
        yield from self._family(
            GaugeMetricFamily,
            [
                (
                    "vllm:num_requests_running sglang:num_running_reqs",
                    "Requests in steps",
                    s.active,
                ),
                ("vllm:num_requests_waiting sglang:num_queue_reqs", "Requests queued", s.queued),
                (
                    "vllm:kv_cache_usage_perc sglang:token_usage",
                    "Share of the KV pool that running requests hold, 0 to 1",
                    s.kv_usage,
                ),
                ("sglang:num_used_tokens", "KV tokens that running requests hold", s.used_tokens),
                (
                    "sglang:gen_throughput",
                    "Tokens generated per second, of late; 0 where nothing runs",
                    self._metrics.throughput.value if s.active else 0.0,
                ),
                ("sglang:max_total_num_tokens", "KV tokens of the pool", s.capacity_tokens),
                (
                    "sglang:cache_hit_rate",
                    "Share of prompt tokens found in the prefix cache since start",
                    c.cached_tokens / c.prompt_tokens if c.prompt_tokens else 0.0,
                ),
                ("loomserve:kv_free_tokens", "KV tokens that nothing holds", s.free_tokens),
                ("loomserve:kv_cached_tokens", "KV tokens of the prefix cache", s.cached_tokens),
                (
                    "loomserve:kv_private_tokens",
                    "KV tokens of running requests outside the prefix cache",
                    s.private_tokens,
                ),
                ("loomserve:free_rows", "Requests that could still be admitted", s.free_rows),
                (
                    "loomserve:new_token_ratio",
                    "Share of their remaining output that is reserved for running requests",
                    s.new_token_ratio,
                ),
                ("loomserve:chunk_tokens", "Prefill tokens of a step at most", s.chunk_tokens),
                (
                    "loomserve:slo_feasible",
                    "1 if the smallest chunk holds --tpot-slo-ms, 0 if not, -1 if unknown",
                    -1 if s.slo_feasible is None else int(s.slo_feasible),
                ),
                (
                    "loomserve:invariant_broken",
                    "1 if a recount while idle found the scheduler's books wrong",
                    int(s.invariant_error is not None),
                ),
                ("loomserve:connections", "Open connections", self._metrics.connections()),
            ],
        )

    def _cache_info(self) -> Metric:
        labels = {"model_name": self._label, **self._metrics.cache_info}
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV pool, in labels", labels=list(labels)
        )
        family.add_metric(list(labels.values()), 1)
        return family

    def _counters(self, s: SchedulerStatistics) -> Iterator[Metric]:
        c = s.counters
        yield from self._family(
            CounterMetricFamily,
            [
                (
                    "vllm:prompt_tokens sglang:prompt_tokens vllm:prefix_cache_queries",
                    "Prompt tokens of admitted requests, all of them looked up in the prefix cache",
                    c.prompt_tokens,
                ),
                (
                    "vllm:generation_tokens sglang:generation_tokens",
                    "Tokens generated",
                    c.output_tokens,
                ),
                (
                    "vllm:num_preemptions sglang:num_retracted_requests",
                    "Running requests that had to give their KV back",
                    c.retractions + c.preemptions,
                ),
                (
                    "vllm:prefix_cache_hits sglang:cached_tokens",
                    "Prompt tokens found there",
                    c.cached_tokens,
                ),
                ("sglang:num_requests", "Requests that ended", sum(c.finished.values())),
                ("sglang:num_aborted_requests", "Requests aborted", c.finished.get("abort", 0)),
                ("loomserve:chunks", "Chunks of prompts computed", c.chunks),
                ("loomserve:step_failures", "Steps that failed", c.failed_steps),
            ],
        )

    def _labelled_counters(self, s: SchedulerStatistics) -> Iterator[Metric]:
        c, refused = s.counters, self._metrics.rejected
        finished = {reason.value: c.finished.get(reason.value, 0) for reason in FinishReason}
        steps = {"prefill": c.prefill_steps, "decode": c.decode_steps, "mixed": c.mixed_steps}
        for name, help, label, values in (
            (
                "vllm:request_success",
                "Requests that ended, by how (aborted ones too)",
                "finished_reason",
                finished,
            ),
            ("loomserve:steps", "Steps, by kind", "kind", steps),
            ("loomserve:refused_requests", "Error answers, by status", "status", refused),
            (
                "loomserve:wait_seconds",
                "Seconds for which each term kept the queue's head from being admitted"
                " (next_pass runs while nothing waits, too)",
                "term",
                s.wait_seconds,
            ),
        ):
            family = CounterMetricFamily(name, help, labels=["model_name", label])
            for key, value in values.items():
                family.add_metric([self._label, key], value)
            yield family

    def _histograms(self) -> Iterator[Metric]:
        m = self._metrics
        for names, help, histogram in (
            (
                "vllm:time_to_first_token_seconds sglang:time_to_first_token_seconds",
                "Arrival to first token",
                m.time_to_first_token,
            ),
            (
                "vllm:inter_token_latency_seconds vllm:time_per_output_token_seconds"
                " sglang:inter_token_latency_seconds",
                "Time between two tokens of a request",
                m.inter_token_latency,
            ),
            (
                "vllm:request_time_per_output_token_seconds sglang:time_per_output_token_seconds",
                "Mean time per token after the first, per request",
                m.time_per_output_token,
            ),
            (
                "vllm:request_queue_time_seconds sglang:queue_time_seconds",
                "Time in the queue, until the first token",
                m.queue_time,
            ),
            (
                "vllm:e2e_request_latency_seconds sglang:e2e_request_latency_seconds",
                "Arrival to end",
                m.request_latency,
            ),
            ("vllm:request_prompt_tokens", "Prompt tokens per request", m.request_prompt_tokens),
            (
                "vllm:request_generation_tokens",
                "Generated tokens per request",
                m.request_generation_tokens,
            ),
            (
                "vllm:request_max_num_generation_tokens",
                "Generated tokens of a request's longest choice",
                m.longest_choice_tokens,
            ),
            (
                "vllm:request_prefill_time_seconds",
                "Time from leaving the queue to the first token",
                m.prefill_time,
            ),
            (
                "vllm:request_decode_time_seconds",
                "Time from the first token to the last",
                m.decode_time,
            ),
            ("loomserve:step_seconds", "Launch of a step to its result", m.step_time),
            (
                "loomserve:event_loop_lag_seconds",
                "How late a timer of the event loop was, every 20 ms",
                m.loop_lag,
            ),
            (
                "loomserve:event_loop_cpu_seconds",
                "Processor time of the event loop's thread between two such timers",
                m.loop_cpu,
            ),
        ):
            for name in names.split():
                family = HistogramMetricFamily(name, help, labels=["model_name"])
                family.add_metric([self._label], histogram.buckets(), histogram.sum)
                yield family
        family = HistogramMetricFamily(
            "loomserve:request_wait_seconds",
            "Time in the queue until the first token, per request and term waited for",
            labels=["model_name", "term"],
        )
        for term, histogram in m.wait_time.items():
            family.add_metric([self._label, term], histogram.buckets(), histogram.sum)
        yield family

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        rows: list[tuple[str, str, float]],
    ) -> Iterator[Metric]:
        for names, help, value in rows:
            for name in names.split():
                family = kind(name, help, labels=["model_name"])
                family.add_metric([self._label], value)
                yield family
