"""Spans as a collector gets them: their names, times and parents, and what is done without one."""

from __future__ import annotations

import asyncio
import http.server
import re
import threading
import time
from contextlib import contextmanager

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.semconv._incubating.attributes import (
    error_attributes,
    gen_ai_attributes,
    http_attributes,
    url_attributes,
)

from runtime.errors import ConfigError
from server.observability.spans import MAX_SPANS, traces_url
from tests.fakes import fake_runner, fake_server

# From the example of the W3C's recommendation.
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
STEP_S = 0.004


class Collector(http.server.ThreadingHTTPServer):
    """Decodes what is sent to /v1/traces."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.received: list[ExportTraceServiceRequest] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self) -> list[Span]:
        return [
            span
            for request in self.received
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]


class Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path == "/v1/traces"
        assert self.headers["Content-Type"] == "application/x-protobuf"
        self.server.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        pass


@contextmanager
def collector():
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attributes(span):
    found = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        if kind == "array_value":
            value = [one.string_value for one in value.values]
        found[pair.key] = value
    return found


def by_name(spans):
    return {span.name: span for span in spans}


async def test_a_request_is_a_span_with_its_stages_inside():
    runner = fake_runner(step_seconds=lambda batch: STEP_S)
    with collector() as found:
        begun = time.time_ns()
        async with fake_server(runner=runner, otlp_endpoint=found.address) as server:
            body = await server.complete(
                "x" * 150, max_tokens=6, ignore_eos=True, temperature=0.5, top_p=0.9
            )
            await server.get("/health")
        ended = time.time_ns()
    (request,) = found.received
    resource = attributes(request.resource_spans[0].resource)
    assert resource["service.name"] == "loomserve"
    spans = by_name(found.spans())
    assert set(spans) == {"text_completion fake", "queue", "prefill", "decode"}
    whole = spans.pop("text_completion fake")
    assert whole.kind == Span.SPAN_KIND_SERVER
    assert not whole.parent_span_id
    assert begun <= whole.start_time_unix_nano < whole.end_time_unix_nano <= ended
    for span in spans.values():
        assert (span.trace_id, span.parent_span_id) == (whole.trace_id, whole.span_id)
        assert whole.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= whole.end_time_unix_nano
    assert spans["queue"].end_time_unix_nano == spans["prefill"].start_time_unix_nano
    assert spans["prefill"].end_time_unix_nano == spans["decode"].start_time_unix_nano
    decode = spans["decode"].end_time_unix_nano - spans["decode"].start_time_unix_nano
    assert decode >= 5 * STEP_S * 1e9 * 0.9
    told = attributes(whole)
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "fake"
    assert told["gen_ai.response.id"] == body["id"]
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["gen_ai.usage.input_tokens"] == 150
    assert told["gen_ai.usage.output_tokens"] == told["gen_ai.request.max_tokens"] == 6
    assert told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.request.top_p"] == 0.9
    assert told["gen_ai.response.time_to_first_chunk"] >= STEP_S
    assert (told["http.response.status_code"], told["url.path"]) == (200, "/v1/completions")
    assert told["loomserve.prefill_chunks"] == 3
    assert "error.type" not in told


async def test_names_are_those_of_the_conventions():
    modules = (gen_ai_attributes, http_attributes, url_attributes, error_attributes)
    known = {
        value
        for module in modules
        for name, value in vars(module).items()
        if re.fullmatch("[A-Z_]+", name)
    }
    with collector() as found:
        async with fake_server(otlp_endpoint=found.address) as server:
            await server.chat(n=2, max_tokens=3, top_k=5)
    spans = found.spans()
    (whole,) = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
    assert whole.name == "chat fake"
    names = {name for name in attributes(whole) if not name.startswith("loomserve.")}
    assert names <= known
    operations = {one.value for one in gen_ai_attributes.GenAiOperationNameValues}
    assert attributes(whole)["gen_ai.operation.name"] in operations
    assert attributes(whole)["gen_ai.request.choice.count"] == 2
    decodes = [attributes(span) for span in spans if span.name == "decode"]
    assert sorted(one["loomserve.choice"] for one in decodes) == [0, 1]


@pytest.mark.parametrize(
    ("header", "parent"),
    [
        (f"00-{TRACE}-{PARENT}-01", PARENT),
        ("00-zz-1-01", None),  # what is no such header begins a trace of its own
        (f"00-{'0' * 32}-{PARENT}-01", None),
    ],
)
async def test_a_traceparent_is_honoured(header, parent):
    with collector() as found:
        async with fake_server(otlp_endpoint=found.address) as server:
            body = {"prompt": "abc", "max_tokens": 2}
            await server.post("/v1/completions", body, headers={"traceparent": header})
    (whole,) = [span for span in found.spans() if span.kind == Span.SPAN_KIND_SERVER]
    assert (whole.parent_span_id.hex() or None) == parent
    assert (whole.trace_id.hex() == TRACE) == (parent is not None)


async def test_what_the_caller_does_not_trace_is_not_sent():
    with collector() as found:
        async with fake_server(otlp_endpoint=found.address) as server:
            body = {"prompt": "abc", "max_tokens": 2}
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
            await server.post("/v1/completions", body, headers=headers)
    assert found.spans() == []


async def test_a_failed_request_and_a_client_that_left_are_errors():
    runner = fake_runner(step_seconds=lambda batch: STEP_S)
    with collector() as found:
        async with fake_server(runner=runner, otlp_endpoint=found.address) as server:
            body = {"prompt": "abc", "max_tokens": 900, "ignore_eos": True}
            status, _ = await server.post("/v1/completions", {**body, "timeout": 0.03})
            assert status == 504
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await server.post("/v1/completions", body)
            await server.wait_idle()
    wholes = [span for span in found.spans() if span.kind == Span.SPAN_KIND_SERVER]
    assert [attributes(span)["error.type"] for span in wholes] == ["504", "499"]
    assert all(span.status.code == Status.STATUS_CODE_ERROR for span in wholes)


@pytest.mark.slow  # it is asked again for two seconds
async def test_without_a_collector_the_queue_is_bounded_and_serving_goes_on():
    with collector() as found:
        gone = found.address
    async with fake_server(otlp_endpoint=gone) as server:
        spans = server.service.spans
        assert spans is not None
        for _ in range(3):
            assert await server.complete("abc", max_tokens=2)
        processor = spans._provider._active_span_processor._span_processors[0]
        assert processor._batch_processor._queue.maxlen == MAX_SPANS  # type: ignore[attr-defined]
        begun = time.monotonic()
    assert time.monotonic() - begun < 10, "the end does not wait for it"


def test_where_spans_go():
    assert traces_url("http://h:4318") == traces_url("http://h:4318/") == "http://h:4318/v1/traces"
    assert traces_url("https://h/otel/v1/traces") == "https://h/otel/v1/traces"
    for wrong in ("h:4318", "ftp://h", "http://", "http://h:99999", "http://h:x"):
        with pytest.raises(ConfigError, match="otlp_endpoint"):
            traces_url(wrong)
