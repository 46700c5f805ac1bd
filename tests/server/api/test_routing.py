"""What routers and gateways ask of an engine, with the values that they compare."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading

from prometheus_client.parser import text_string_to_metric_families

from server.api.routing import LOAD_FORMAT_HEADER, LOAD_HEADER
from tests.fakes import fake_runner, fake_server

USER = [{"role": "user", "content": "hello"}]


@contextlib.asynccontextmanager
async def busy_server():
    """Two requests of 40 tokens run, one of 100 waits, and no step ends inside the block.
    Two running rows hold three pages of 16 tokens each."""
    gate = threading.Event()

    def wait(batch):
        gate.wait(60)
        return 0.0

    rules = {"max_running_requests": 2, "chunked_prefill_size": 512}
    async with fake_server(runner=fake_runner(step_seconds=wait), scheduler=rules) as server:
        sizes = (40, 40, 100)
        bodies = [{"input_ids": [1 + at] * size} for at, size in enumerate(sizes)]
        tasks = [asyncio.ensure_future(server.post("/generate", body)) for body in bodies]
        statistics = server.service.engine.scheduler.statistics
        async with asyncio.timeout(30):
            while (statistics().active, statistics().queued) != (2, 1):  # noqa: ASYNC110
                await asyncio.sleep(0)
        try:
            yield server
        finally:
            gate.set()
            assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 3


async def test_load_counts_who_runs_and_who_waits_and_the_tokens_of_both():
    async with busy_server() as server:
        (load,) = (await server.get("/get_load"))[1]
        assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_reqs"]) == (2, 1, 3)
        assert load["num_tokens"] == 2 * 48 + 100
        assert load["token_usage"] == 2 * 48 / load["max_total_num_tokens"]
        async with server.client.get(server.url + "/metrics") as answer:
            (told,) = re.findall(
                r"^sglang:max_total_num_tokens\S+ (\S+)$", await answer.text(), re.M
            )
        assert float(told) == load["max_total_num_tokens"]
    async with fake_server() as server:
        (idle,) = (await server.get("/get_load"))[1]
        assert (idle["num_reqs"], idle["num_tokens"], idle["token_usage"]) == (0, 0, 0.0)


async def test_an_answer_tells_the_load_in_its_headers_where_it_is_asked_to():
    async with busy_server() as server:
        told = {}
        for form in ("JSON", "text", "BIN", None):
            headers = {LOAD_FORMAT_HEADER: form} if form else {}
            async with server.client.get(server.url + "/v1/models", headers=headers) as answer:
                told[form] = answer.headers.get(LOAD_HEADER)
        assert told["BIN"] is None
        assert told[None] is None
        kind, _, figures = told["JSON"].partition(" ")
        assert kind == "JSON"
        named = json.loads(figures)["named_metrics"]
        assert (named["num_requests_running"], named["num_requests_waiting"]) == (2, 1)
        assert named["num_tokens"] == 196
        parts = told["text"].removeprefix("TEXT ").split(", ")
        as_text = {name: float(value) for name, value in (part.split("=") for part in parts)}
        assert as_text == {f"named_metrics.{name}": value for name, value in named.items()}


async def test_streams_tell_the_load_too():
    async with fake_server() as server:
        body = {"prompt": "x", "stream": True, "max_tokens": 2}
        headers = {LOAD_FORMAT_HEADER: "json"}
        async with server.client.post(
            server.url + "/v1/completions", json=body, headers=headers
        ) as answer:
            assert answer.headers[LOAD_HEADER].startswith("JSON {")
            assert (await answer.text()).endswith("data: [DONE]\n\n")


async def test_model_info_says_which_model_it_is_and_under_both_names():
    async with fake_server(weight_version="step-7") as server:
        status, found = await server.get("/model_info")
        assert status == 200
        assert found["weight_version"] == "step-7"
        assert (
            found["context_length"]
            == (await server.get("/v1/models"))[1]["data"][0]["max_model_len"]
        )
        assert found["is_generation"] is True
        assert found["capabilities"]["chat"] is True
        assert found["capabilities"]["embedding"] is False
        assert (await server.get("/get_model_info"))[1] == found
        info = (await server.get("/server_info"))[1]
        assert info["weight_version"] == "step-7"
        assert info["served_model_name"] == info["model"] == found["served_model_name"]
        assert (await server.get("/get_server_info"))[1]["options"] == info["options"]


async def test_ready_fails_in_a_drain_and_the_process_lives():
    paths = ("/live", "/health", "/ready")
    async with fake_server(api_key="k") as server:
        assert [(await server.get(path))[0] for path in paths] == [200, 200, 200]
        server.service.draining = True
        assert [(await server.get(path))[0] for path in paths] == [200, 200, 503]


async def test_rendered_prompts_are_the_ones_that_are_computed():
    async with fake_server() as server:
        body = {"messages": USER, "max_tokens": 1}
        status, rendered = await server.post("/v1/chat/completions/render", body)
        assert status == 200
        assert (
            rendered["token_ids"]
            == (await server.post("/tokenize", {"messages": USER}))[1]["tokens"]
        )
        usage = (await server.chat(USER, max_tokens=1))["usage"]
        assert usage["prompt_tokens"] == len(rendered["token_ids"])
        status, two = await server.post("/v1/completions/render", {"prompt": ["ab", "c"]})
        assert status == 200
        assert [one["token_ids"] for one in two] == [list(b"ab"), list(b"c")]
        status, error = await server.post("/v1/chat/completions/render", {"messages": []})
        assert (status, error["error"]["param"]) == (400, "messages")
        assert server.runner.steps == 1, "rendering computes nothing"


async def test_metrics_describe_the_pool_for_schedulers_that_count_blocks():
    async with fake_server(scheduler={"page_size": 32}, runner=fake_runner(page_size=32)) as server:
        async with server.client.get(server.url + "/metrics") as answer:
            text = await answer.text()
        families = {one.name: one.samples for one in text_string_to_metric_families(text)}
        (sample,) = families["vllm:cache_config_info"]
        assert sample.value == 1
        assert sample.labels["block_size"] == "32"
        assert int(sample.labels["num_gpu_blocks"]) == server.runner.info.max_total_tokens // 32
        # What the endpoint pickers of the Gateway API and of llm-d score by.
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert len(families[f"vllm:{name}"]) == 1
