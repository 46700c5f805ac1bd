"""What dashboards ask for by vLLM's and SGLang's names, on a simulated model of known pace."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.runner import LaunchedStep
from server.generation.metrics import Throughput
from tests.fakes import fake_runner, fake_server

STEP_S = 0.02
BOTH: dict[str, Any] = {"metrics_compat": ("vllm", "sglang")}


async def samples(server) -> dict[str, float]:
    """Values of the samples that only have the model as a label, by name."""
    async with server.client.get(server.url + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.partition("{")[0]: float(value) for name, value in pairs if "le=" not in name}


async def test_queue_prefill_and_decode_make_up_a_request_s_time():
    runner = fake_runner(step_seconds=lambda batch: STEP_S)
    async with fake_server(runner=runner, scheduler={"max_running_requests": 1}, **BOTH) as server:
        body = {"prompt": "abc", "max_tokens": 6, "ignore_eos": True}
        await asyncio.gather(*(server.post("/v1/completions", body) for _ in range(3)))
        found = await samples(server)
    sums = {
        name: found[f"vllm:{name}_seconds_sum"]
        for name in ("request_queue_time", "request_prefill_time", "request_decode_time")
    }
    for name in sums:
        assert found[f"vllm:{name}_seconds_count"] == 3
    first = found["vllm:time_to_first_token_seconds_sum"]
    assert sums["request_queue_time"] + sums["request_prefill_time"] == pytest.approx(first)
    # Five steps lie between six tokens; the second and third wait for whole answers.
    assert sums["request_decode_time"] >= 3 * 5 * STEP_S
    assert sums["request_prefill_time"] >= 3 * STEP_S * 0.9
    assert sums["request_queue_time"] >= 3 * 5 * STEP_S
    whole = found["vllm:e2e_request_latency_seconds_sum"]
    assert sum(sums.values()) <= whole + 1e-6


async def test_the_longest_choice_of_each_request_is_counted_once():
    async with fake_server(**BOTH) as server:
        body = {"prompt": "abc", "max_tokens": 4, "ignore_eos": True}
        await server.post("/v1/completions", body)
        await server.post("/v1/completions", {**body, "n": 3, "max_tokens": 7})
        found = await samples(server)
    assert found["vllm:request_max_num_generation_tokens_count"] == 2
    assert found["vllm:request_max_num_generation_tokens_sum"] == 4 + 7
    assert found["vllm:request_generation_tokens_count"] == 4
    assert found["sglang:gen_throughput"] == 0.0


def test_throughput_is_that_of_the_last_second_without_pauses():
    rate = Throughput()
    for tick in range(41):  # two tokens every 50 ms
        rate.add(2, 100 + tick / 20)
    assert rate.value == pytest.approx(40)
    rate.add(2, 1000.0)  # a pause is no part of any second
    assert rate.value == pytest.approx(40)
    for tick in range(1, 11):
        rate.add(1, 1000 + tick / 10)
    assert rate.value == pytest.approx(10)


async def test_ping_and_version_answer():
    async with fake_server(api_key="sesame") as server:
        assert await server.get("/ping") == (200, {"status": "ok"})
        assert (await server.get("/version"))[0] == 401
        key = {"X-Api-Key": "sesame"}
        status, body = await server.get("/version", headers=key)
        _, info = await server.get("/server_info", headers=key)
        assert (status, body["version"]) == (200, info["version"])
        server.service.draining = True
        assert (await server.get("/ping"))[0] == 503


# What the dashboards ask for that vLLM and SGLang have in their own repositories.
OF_VLLM = """
    e2e_request_latency_seconds_bucket e2e_request_latency_seconds_sum
    e2e_request_latency_seconds_count prompt_tokens_total generation_tokens_total
    time_per_output_token_seconds_bucket time_per_output_token_seconds_sum
    time_per_output_token_seconds_count num_requests_running num_requests_waiting
    time_to_first_token_seconds_bucket time_to_first_token_seconds_sum
    time_to_first_token_seconds_count gpu_cache_usage_perc request_prompt_tokens_bucket
    request_generation_tokens_bucket request_success_total request_queue_time_seconds_sum
    request_prefill_time_seconds_sum request_decode_time_seconds_sum
    request_max_num_generation_tokens_sum
"""
OF_SGLANG = """
    e2e_request_latency_seconds_bucket e2e_request_latency_seconds_sum
    e2e_request_latency_seconds_count time_to_first_token_seconds_bucket
    time_to_first_token_seconds_sum time_to_first_token_seconds_count num_running_reqs
    gen_throughput cache_hit_rate num_queue_reqs
"""
# What gateways score servers by, whatever they are told.
OF_GATEWAYS = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:token_usage",
    "sglang:max_total_num_tokens",
}


async def names_of(server) -> set[str]:
    """Of every sample that has the model as a label."""
    async with server.client.get(server.url + "/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.labels["model_name"] == "fake" for sample in samples)
    return {sample.name for sample in samples}


async def test_the_others_dashboards_find_their_names_where_they_are_asked_for():
    names = {}
    for compat in ((), ("vllm",), ("sglang",), ("vllm", "sglang")):
        async with fake_server(metrics_compat=compat) as server:
            await server.complete(max_tokens=4)
            names[compat] = await names_of(server)
    assert {one for one in names[()] if not one.startswith("loomserve:")} == OF_GATEWAYS
    assert {f"vllm:{one}" for one in OF_VLLM.split()} <= names["vllm",]
    assert {f"sglang:{one}" for one in OF_SGLANG.split()} <= names["sglang",]
    assert names["vllm", "sglang"] == names["vllm",] | names["sglang",]
    own = {one for one in names[()] if one.startswith("loomserve:")}
    assert all(own <= found for found in names.values())


async def test_the_device_s_waits_are_those_of_the_steps_that_followed_another():
    """The host is slow: without overlap the device stands still in each of its pauses."""
    medians = {}
    for disable_overlap in (True, False):
        runner = fake_runner(step_seconds=lambda batch: 0.006)
        async with fake_server(runner=runner, disable_overlap=disable_overlap) as server:
            scheduler = server.service.engine.scheduler
            plan = scheduler.plan

            def slow(now, plan=plan):
                until = time.perf_counter() + 0.002
                while time.perf_counter() < until:
                    pass
                return plan(now)

            scheduler.plan = slow
            for _ in range(2):  # the server is idle in between, which is no wait
                await server.complete(max_tokens=20, ignore_eos=True)
                await server.wait_idle()
            histogram = server.service.metrics.device_idle
            records = list(server.service.engine.records)
        waits = [one.idle_s for one in records if one.idle_s is not None]
        assert sum(histogram.counts) == len(waits) >= 30
        assert histogram.sum == pytest.approx(sum(waits))
        assert [one.idle_s for one in records if one.prefill_rows] == [None, None]
        medians[disable_overlap] = statistics.median(waits)
    assert medians[True] > 0.002
    assert medians[False] < medians[True] / 2


async def test_kernels_that_serving_had_to_wait_for_are_counted_and_told(caplog, monkeypatch):
    """And the host's time is measured for every step."""
    end, compiled = LaunchedStep.end, iter((0, 2, 0, 1))

    def ended(step, output):
        output.compiled_kernels = next(compiled, 0)
        end(step, output)

    monkeypatch.setattr(LaunchedStep, "end", ended)
    async with fake_server() as server:
        await server.complete(max_tokens=6, ignore_eos=True)
        await server.wait_idle()
        metrics, records = server.service.metrics, list(server.service.engine.records)
    assert metrics.compiled_kernels == 3
    told = [message for message in caplog.messages if "to be compiled" in message]
    assert len(told) == 2
    assert "step 1 waited for 2 kernels" in told[0]
    assert sum(metrics.step_host_time.counts) == len(records) >= 6
    assert metrics.step_host_time.sum == pytest.approx(sum(one.host_s for one in records))
