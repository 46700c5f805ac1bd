"""Requests as OpenTelemetry spans, under the names of its conventions for generative AI.

    chat MODEL              the request, a child of what its `traceparent` header names
      queue, prefill, decode    of each choice

Spans are made when the answer is over, and sent by the SDK's thread. Its queue is bounded: while
the collector is away the oldest are dropped. Needs the extra `otel`.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from runtime.errors import ConfigError
from server.version import version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from opentelemetry.context import Context

    from server.generation.timeline import Timeline
    from server.observability.request_report import RequestReport

MAX_SPANS = 2048  # that wait for the collector
BATCH_SPANS = 512
SEND_SECONDS = 1.0
GIVE_UP_SECONDS = 5.0
CLOSE_SECONDS = 2.0
MAX_CHOICES = 8  # that have spans of their own

_OPERATIONS = {"/v1/completions": "text_completion", "/generate": "text_completion"}
_SAMPLING = {  # fields of SamplingParams
    "max_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
}

Attributes = dict[str, Any]


class Spans:
    """Sends a request's spans.

    Args:
        endpoint: the collector's address, such as http://127.0.0.1:4318.
        model: the served name.
        clock: the engine's.

    Raises: ConfigError: the endpoint is no such address.
    """

    def __init__(self, endpoint: str, model: str, clock: Callable[[], float]) -> None:
        self._model = model
        self._clock = clock
        exporter = OTLPSpanExporter(traces_url(endpoint), timeout=GIVE_UP_SECONDS)
        own = Resource({"service.name": "loomserve", "service.version": version()})
        self._provider = TracerProvider(
            # What OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME say comes first.
            resource=own.merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, MAX_SPANS, 1000 * SEND_SECONDS, BATCH_SPANS)
        )
        self._tracer = self._provider.get_tracer("loomserve", version())
        self._propagator = TraceContextTextMapPropagator()

    def send(self, report: RequestReport) -> None:
        """A request's answer is over."""
        epoch_s = time.time() - self._clock()

        def at(moment_s: float) -> int:
            return int(1e9 * (epoch_s + moment_s))

        operation = _OPERATIONS.get(report.path, "chat")
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._propagator.extract(report.headers),
            kind=SpanKind.SERVER,
            start_time=at(report.received_s),
        )
        if span.is_recording():  # the caller may have decided against it
            span.set_attributes(self._attributes(report, operation))
            if report.status >= 400 or _failed(report):
                span.set_status(Status(StatusCode.ERROR))
            inside = set_span_in_context(span)
            for index, choice in enumerate(report.choices[:MAX_CHOICES]):
                self._stages(choice, index, inside, at)
        span.end(at(report.ended_s))

    def _attributes(self, report: RequestReport, operation: str) -> Attributes:
        usage, told, sampling = report.usage, report.timings, report.choices[0].request.sampling
        found: Attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "loomserve",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": report.answer_id,
            "gen_ai.response.finish_reasons": [choice.finish for choice in report.choices],
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.usage.cache_creation.input_tokens": usage.kept_tokens,
            "http.request.method": "POST",
            "http.response.status_code": report.status,
            "url.path": report.path,
            "loomserve.request_id": report.request_id,
            "loomserve.prefill_chunks": told.prefill_chunks,
            "loomserve.retractions": told.retractions,
        }
        if len(report.choices) > 1:
            found["gen_ai.request.choice.count"] = len(report.choices)
        if told.first_token_s is not None:
            found["gen_ai.response.time_to_first_chunk"] = told.first_token_s
        if report.status >= 400:
            found["error.type"] = str(report.status)
        elif _failed(report):
            found["error.type"] = next(one.finish for one in report.choices if one.finish in _FAILS)
        for name, of_ours in _SAMPLING.items():
            value = getattr(sampling, of_ours)
            if value is not None:
                found[f"gen_ai.request.{name}"] = value
        return found | {f"loomserve.wait.{term}_s": s for term, s in told.waited_s.items()}

    def _stages(
        self, choice: Timeline, index: int, inside: Context, at: Callable[[float], int]
    ) -> None:
        for name, begin_s, end_s in _stages_of(choice):
            span = self._tracer.start_span(name, context=inside, start_time=at(begin_s))
            span.set_attribute("loomserve.choice", index)
            span.end(at(end_s))

    def close(self) -> None:
        """Sends what is left, where the collector takes it in a moment. Idempotent."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


_FAILS = ("error", "timeout")


def _failed(report: RequestReport) -> bool:
    """Whether a choice ended in an error, which a stream tells behind its status."""
    return any(choice.finish in _FAILS for choice in report.choices)


def _stages_of(choice: Timeline) -> Iterator[tuple[str, float, float]]:
    for spell in choice.spells:
        yield "queue", spell.since_s, spell.until_s
    first_s, last_s = choice.first_token_s, choice.last_token_s
    if choice.admitted_s is not None and first_s is not None and last_s is not None:
        yield "prefill", choice.admitted_s, first_s
        yield "decode", first_s, last_s


def traces_url(endpoint: str) -> str:
    """Where an endpoint takes spans. Raises: ConfigError: it is no address of HTTP."""
    try:
        parts = urlsplit(endpoint)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise ConfigError(
            f"otlp_endpoint {endpoint!r}: must be an address such as http://127.0.0.1:4318"
        )
    return endpoint if parts.path.endswith("/v1/traces") else endpoint.rstrip("/") + "/v1/traces"
