"""What dashboards ask for by vLLM's and SGLang's names, on a simulated model of known pace."""

from __future__ import annotations

import asyncio

import pytest

from server.generation.metrics import Throughput
from tests.fakes import fake_runner, fake_server

STEP_S = 0.02


async def samples(server) -> dict[str, float]:
    """Values of the samples that only have the model as a label, by name."""
    async with server.client.get(server.url + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.partition("{")[0]: float(value) for name, value in pairs if "le=" not in name}


async def test_queue_prefill_and_decode_make_up_a_request_s_time():
    runner = fake_runner(step_seconds=lambda batch: STEP_S)
    async with fake_server(runner=runner, scheduler={"max_running_requests": 1}) as server:
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
    async with fake_server() as server:
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
