"""What /metrics shows, rendered through prometheus_client when asked.

Counts are the scheduler's own, latencies the server's. Every figure has a name that begins with
`loomserve:`. Those that gateways and routers score by are also told by the names of vLLM and
SGLang; under --metrics-compat all that these have, so that dashboards made for either show it.
"""

from __future__ import annotations

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

    from runtime.scheduling.accounting import Counters
    from runtime.scheduling.statistics import SchedulerStatistics
    from server.generation.metrics import Histogram, Metrics

    # The names, what they mean, and how the figure is found.
    Gauge = tuple[str, str, Callable[[SchedulerStatistics, Metrics], float]]
    Count = tuple[str, str, Callable[[Counters], float]]
    Labelled = tuple[str, str, str, Callable[[SchedulerStatistics, Metrics], Mapping[str, float]]]
    Spread = tuple[str, str, Callable[[Metrics], Histogram]]

# Read by the endpoint pickers of the Gateway API and of llm-d, and by SGLang's router.
GATEWAY_NAMES = frozenset(
    (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "sglang:token_usage",
        "sglang:max_total_num_tokens",
    )
)
# Where there is a figure, its own name comes first.
_GAUGES: Sequence[Gauge] = (
    (
        "loomserve:requests_running vllm:num_requests_running sglang:num_running_reqs",
        "Requests in steps",
        lambda s, m: s.active,
    ),
    (
        "loomserve:requests_waiting vllm:num_requests_waiting sglang:num_queue_reqs",
        "Requests queued",
        lambda s, m: s.queued,
    ),
    (
        "loomserve:kv_usage vllm:kv_cache_usage_perc vllm:gpu_cache_usage_perc sglang:token_usage",
        "Share of the KV pool that running requests hold, 0 to 1",
        lambda s, m: s.kv_usage,
    ),
    (
        "loomserve:kv_used_tokens sglang:num_used_tokens",
        "KV tokens that running requests hold",
        lambda s, m: s.used_tokens,
    ),
    (
        "loomserve:generation_throughput sglang:gen_throughput",
        "Tokens generated per second, of late; 0 where nothing runs",
        lambda s, m: m.throughput.value if s.active else 0.0,
    ),
    (
        "loomserve:kv_total_tokens sglang:max_total_num_tokens",
        "KV tokens that requests can have",
        lambda s, m: s.capacity_tokens - s.reserved_tokens,
    ),
    (
        "loomserve:cache_hit_rate sglang:cache_hit_rate",
        "Share of prompt tokens found in the prefix cache since start",
        lambda s, m: s.counters.cached_tokens / max(1, s.counters.prompt_tokens),
    ),
    (
        "loomserve:kv_free_tokens",
        "KV tokens that nothing holds",
        lambda s, m: s.free_tokens,
    ),
    (
        "loomserve:kv_cached_tokens",
        "KV tokens of the prefix cache",
        lambda s, m: s.cached_tokens,
    ),
    (
        "loomserve:kv_pinned_tokens",
        "Tokens of the prefix cache that requests asked to be kept, as of the last pass",
        lambda s, m: s.pinned_tokens,
    ),
    (
        "loomserve:kv_tier_tokens",
        "KV tokens kept below the pool, in host memory or the file",
        lambda s, m: s.tier_tokens,
    ),
    (
        "loomserve:kv_private_tokens",
        "KV tokens of running requests outside the prefix cache",
        lambda s, m: s.private_tokens,
    ),
    (
        "loomserve:free_rows",
        "Requests that could still be admitted",
        lambda s, m: s.free_rows,
    ),
    (
        "loomserve:new_token_ratio",
        "Share of their remaining output that is reserved for running requests",
        lambda s, m: s.new_token_ratio,
    ),
    (
        "loomserve:chunk_tokens",
        "Prefill tokens of a step at most",
        lambda s, m: s.chunk_tokens,
    ),
    (
        "loomserve:slo_feasible",
        "1 if the smallest chunk holds --tpot-slo-ms, 0 if not, -1 if unknown",
        lambda s, m: -1 if s.slo_feasible is None else int(s.slo_feasible),
    ),
    (
        "loomserve:invariant_broken",
        "1 if a recount while idle found the scheduler's books wrong",
        lambda s, m: int(s.invariant_error is not None),
    ),
    (
        "loomserve:compiled_kernels",
        "Kernels that were compiled while requests waited; the warm-up should leave none",
        lambda s, m: m.compiled_kernels,
    ),
    (
        "loomserve:connections",
        "Open connections",
        lambda s, m: m.connections(),
    ),
    (
        "loomserve:request_body_bytes",
        "Bytes of request bodies that arrive or are being answered",
        lambda s, m: m.held_bytes()[0],
    ),
    (
        "loomserve:unsent_answer_bytes",
        "Bytes of answers that clients have not taken yet",
        lambda s, m: m.held_bytes()[1],
    ),
    (
        "loomserve:unread_tokens",
        "Tokens that are there, and that their clients have not made room for",
        lambda s, m: m.unread_tokens(),
    ),
    (
        "loomserve:tasks",
        "Tasks of the event loop that have not ended, of which each connection has one",
        lambda s, m: m.tasks(),
    ),
)
_COUNTS: Sequence[Count] = (
    (
        "loomserve:prompt_tokens vllm:prompt_tokens sglang:prompt_tokens vllm:prefix_cache_queries",
        "Prompt tokens of admitted requests, all of them looked up in the prefix cache",
        lambda c: c.prompt_tokens,
    ),
    (
        "loomserve:generation_tokens vllm:generation_tokens sglang:generation_tokens",
        "Tokens generated",
        lambda c: c.output_tokens,
    ),
    (
        "loomserve:retractions vllm:num_preemptions sglang:num_retracted_requests",
        "Running requests that had to give their KV back",
        lambda c: c.retractions + c.preemptions,
    ),
    (
        "loomserve:cached_tokens vllm:prefix_cache_hits sglang:cached_tokens",
        "Prompt tokens found there",
        lambda c: c.cached_tokens,
    ),
    (
        "sglang:num_requests",
        "Requests that ended",
        lambda c: sum(c.finished.values()),
    ),
    (
        "sglang:num_aborted_requests",
        "Requests aborted",
        lambda c: c.finished.get("abort", 0),
    ),
    (
        "loomserve:loaded_tokens",
        "Tokens whose KV came back from below the pool",
        lambda c: c.loaded_tokens,
    ),
    (
        "loomserve:failed_loads",
        "Loads from below the pool of which not every page could be read",
        lambda c: c.failed_loads,
    ),
    (
        "loomserve:failed_copies",
        "Copies to below the pool of which not every page was done",
        lambda c: c.failed_copies,
    ),
    (
        "loomserve:chunks",
        "Chunks of prompts computed",
        lambda c: c.chunks,
    ),
    (
        "loomserve:step_failures",
        "Steps that failed",
        lambda c: c.failed_steps,
    ),
)
# As _COUNTS, of what is no count of the scheduler's.
_TOTALS: Sequence[Gauge] = (
    (
        "loomserve:pinned_evicted_tokens",
        "Tokens that requests asked to be kept, and that running ones needed before their time",
        lambda s, m: s.pinned_evicted_tokens,
    ),
)
# With the name of the label.
_LABELLED: Sequence[Labelled] = (
    (
        "loomserve:requests vllm:request_success",
        "Requests that ended, by how (aborted ones too)",
        "finished_reason",
        lambda s, m: {one.value: s.counters.finished.get(one.value, 0) for one in FinishReason},
    ),
    (
        "loomserve:steps",
        "Steps, by kind",
        "kind",
        lambda s, m: {
            "prefill": s.counters.prefill_steps,
            "decode": s.counters.decode_steps,
            "mixed": s.counters.mixed_steps,
        },
    ),
    (
        "loomserve:refused_requests",
        "Error answers, by status",
        "status",
        lambda s, m: m.rejected,
    ),
    (
        "loomserve:wait_seconds",
        "Seconds for which each term kept the queue's head from being admitted"
        " (next_pass runs while nothing waits, too)",
        "term",
        lambda s, m: s.wait_seconds,
    ),
)
_SPREADS: Sequence[Spread] = (
    (
        "loomserve:time_to_first_token_seconds vllm:time_to_first_token_seconds"
        " sglang:time_to_first_token_seconds",
        "Arrival to first token",
        lambda m: m.time_to_first_token,
    ),
    (
        "loomserve:inter_token_latency_seconds vllm:inter_token_latency_seconds"
        " vllm:time_per_output_token_seconds"
        " sglang:inter_token_latency_seconds",
        "Time between two tokens of a request",
        lambda m: m.inter_token_latency,
    ),
    (
        "loomserve:time_per_output_token_seconds vllm:request_time_per_output_token_seconds"
        " sglang:time_per_output_token_seconds",
        "Mean time per token after the first, per request",
        lambda m: m.time_per_output_token,
    ),
    (
        "loomserve:request_queue_time_seconds vllm:request_queue_time_seconds"
        " sglang:queue_time_seconds",
        "Time in the queue, until the first token",
        lambda m: m.queue_time,
    ),
    (
        "loomserve:e2e_request_latency_seconds vllm:e2e_request_latency_seconds"
        " sglang:e2e_request_latency_seconds",
        "Arrival to end",
        lambda m: m.request_latency,
    ),
    (
        "loomserve:request_prompt_tokens vllm:request_prompt_tokens",
        "Prompt tokens per request",
        lambda m: m.request_prompt_tokens,
    ),
    (
        "loomserve:request_generation_tokens vllm:request_generation_tokens",
        "Generated tokens per request",
        lambda m: m.request_generation_tokens,
    ),
    (
        "loomserve:request_max_num_generation_tokens vllm:request_max_num_generation_tokens",
        "Generated tokens of a request's longest choice",
        lambda m: m.longest_choice_tokens,
    ),
    (
        "loomserve:conversation_hit_rate",
        "Share of its prompt found in the prefix cache, per turn of a conversation that went on",
        lambda m: m.turn_hit_rate,
    ),
    (
        "loomserve:request_prefill_time_seconds vllm:request_prefill_time_seconds",
        "Time from leaving the queue to the first token",
        lambda m: m.prefill_time,
    ),
    (
        "loomserve:request_decode_time_seconds vllm:request_decode_time_seconds",
        "Time from the first token to the last",
        lambda m: m.decode_time,
    ),
    (
        "loomserve:step_seconds",
        "Launch of a step to its result",
        lambda m: m.step_time,
    ),
    (
        "loomserve:step_host_seconds",
        "The host's own work for a step: to plan, launch or queue, apply and deliver it",
        lambda m: m.step_host_time,
    ),
    (
        "loomserve:device_idle_seconds",
        "The device was idle between two steps, though there was work",
        lambda m: m.device_idle,
    ),
    (
        "loomserve:event_loop_lag_seconds",
        "How late a timer of the event loop was, every 20 ms, or 50 where it has little to do",
        lambda m: m.loop_lag,
    ),
    (
        "loomserve:event_loop_cpu_seconds",
        "Processor time of the event loop's thread between two such timers",
        lambda m: m.loop_cpu,
    ),
)


def render(metrics: Metrics) -> bytes:
    """The exposition text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(metrics))  # type: ignore[arg-type]
    return generate_latest(registry)


class _Snapshot:
    """The metric families of one scrape; a prometheus_client collector."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._label = metrics.model_name

    def collect(self) -> Iterator[Metric]:
        m = self._metrics
        s = m.statistics()
        for names, told, gauge in _GAUGES:
            yield from self._families(GaugeMetricFamily, names, told, gauge(s, m))
        yield self._cache_info()
        for names, told, count in _COUNTS:
            yield from self._families(CounterMetricFamily, names, told, count(s.counters))
        for names, told, total in _TOTALS:
            yield from self._families(CounterMetricFamily, names, told, total(s, m))
        for names, told, label, values in _LABELLED:
            for name in self._shown(names):
                family = CounterMetricFamily(name, told, labels=["model_name", label])
                for key, value in values(s, m).items():
                    family.add_metric([self._label, key], value)
                yield family
        for names, told, histogram_of in _SPREADS:
            histogram = histogram_of(m)
            for name in self._shown(names):
                spread = HistogramMetricFamily(name, told, labels=["model_name"])
                spread.add_metric([self._label], histogram.buckets(), histogram.sum)
                yield spread
        yield self._waits()

    def _shown(self, names: str) -> list[str]:
        """Those of a figure's names that are asked for."""
        shown = ("loomserve", *self._metrics.compat)
        return [
            name
            for name in names.split()
            if name in GATEWAY_NAMES or name.partition(":")[0] in shown
        ]

    def _families(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        names: str,
        told: str,
        value: float,
    ) -> Iterator[Metric]:
        for name in self._shown(names):
            family = kind(name, told, labels=["model_name"])
            family.add_metric([self._label], value)
            yield family

    def _cache_info(self) -> Metric:
        labels = {"model_name": self._label, **self._metrics.cache_info}
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV pool, in labels", labels=list(labels)
        )
        family.add_metric(list(labels.values()), 1)
        return family

    def _waits(self) -> Metric:
        family = HistogramMetricFamily(
            "loomserve:request_wait_seconds",
            "Time in the queue until the first token, per request and term waited for",
            labels=["model_name", "term"],
        )
        for term, histogram in self._metrics.wait_time.items():
            family.add_metric([self._label, term], histogram.buckets(), histogram.sum)
        return family
