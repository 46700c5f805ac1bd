"""Queue and KV from the metrics of several servers."""

from __future__ import annotations

import pytest

from server.bench.server_watch import Sample, read_sample
from server.generation.exposition import render
from tests.fakes import make_fake_service

VLLM = """# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:e2e_request_latency_seconds_bucket{le="0.3",model_name="m"} 5.0
"""
SGLANG = """sglang:num_running_reqs{model_name="m"} 2.0
sglang:num_queue_reqs{model_name="m"} 0.0
sglang:token_usage{model_name="m"} 0.5
"""
LLAMA_CPP = """llamacpp:requests_processing 1
llamacpp:requests_deferred 4
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param(VLLM, Sample(9.0, 4.0, 7.0, 0.5), id="vllm"),
        pytest.param(SGLANG, Sample(9.0, 2.0, 0.0, 0.5), id="sglang"),
        pytest.param(LLAMA_CPP, Sample(9.0, 1.0, 4.0, None), id="llama.cpp"),
        pytest.param("http_requests_total 3\n", None, id="another"),
        pytest.param("", None, id="nothing"),
    ],
)
def test_running_waiting_and_kv_are_read_under_each_server_s_names(text, found):
    assert read_sample(text, 9.0) == found


def test_loomserve_s_own_metrics_are_read():
    service = make_fake_service()
    text = render(service.metrics).decode()
    service.tokenizer.close()
    service.model_format.close()
    assert read_sample(text, 1.0) == Sample(1.0, 0.0, 0.0, 0.0)
