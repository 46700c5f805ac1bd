"""/generate, /metrics, /server_info and the debug endpoints."""

from __future__ import annotations

import itertools
import json
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.fakes import fake_runner, fake_server, says


async def scrape(server) -> dict:
    """Sample values by (name, labels without the model's)."""
    async with server.client.get(server.url + "/metrics") as answer:
        text = await answer.text()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = frozenset((k, v) for k, v in sample.labels.items() if k != "model_name")
            found[sample.name, labels] = sample.value
    return found


async def test_generate_gives_text_ids_and_figures():
    async with fake_server(runner=fake_runner(says("hello"))) as server:
        body = {"text": "abc", "sampling_params": {"max_new_tokens": 9, "temperature": 0}}
        status, found = await server.post("/generate", body)
        assert status == 200
        assert found["text"] == "hello"
        assert found["output_ids"][:5] == list(b"hello")
        meta = found["meta_info"]
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 6)
        assert meta["finish_reason"] == {"type": "stop", "matched": 257}


async def test_generate_answers_under_the_name_that_it_was_given():
    async with fake_server() as server:
        body = {"text": "abc", "rid": "mine", "sampling_params": {"max_new_tokens": 2}}
        assert (await server.post("/generate", body))[1]["meta_info"]["id"] == "mine"
        events = await server.events("/generate", {**body, "stream": True})
        assert {json.loads(one)["meta_info"]["id"] for one in events[:-1]} == {"mine"}


async def test_generate_takes_ids_lists_and_logprobs():
    async with fake_server() as server:
        body: dict[str, Any] = {
            "input_ids": [[1, 2, 3], [4, 5]],
            "sampling_params": {"max_new_tokens": 4},
            "return_logprob": True,
            "top_logprobs_num": 2,
            "logprob_start_len": 0,
        }
        _, found = await server.post("/generate", body)
        assert [one["meta_info"]["prompt_tokens"] for one in found] == [3, 2]
        for one, ids in zip(found, body["input_ids"], strict=True):
            meta = one["meta_info"]
            assert [entry[1] for entry in meta["output_token_logprobs"]] == one["output_ids"]
            assert [entry[1] for entry in meta["input_token_logprobs"]] == ids
            assert all(len(top) == 2 for top in meta["output_top_logprobs"])


async def test_generate_streams_what_has_come_so_far():
    async with fake_server() as server:
        body = {"text": "abc", "sampling_params": {"max_new_tokens": 5}}
        events = await server.events("/generate", body)
        texts = [json.loads(event)["text"] for event in events[:-1]]
        assert events[-1] == "[DONE]"
        assert all(b.startswith(a) for a, b in itertools.pairwise(texts))
        _, whole = await server.post("/generate", body)
        assert texts[-1] == whole["text"]


async def test_generate_names_fields_as_its_clients_do():
    async with fake_server() as server:
        for body, name in (
            ({"text": "x", "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
            ({"text": "x", "input_ids": [1]}, "text"),
            ({}, "text"),
            ({"input_ids": [999]}, "input_ids[0]"),
            ({"text": [1]}, "text"),
        ):
            status, found = await server.post("/generate", body)
            assert status == 400
            assert name in found["error"]["message"]


async def test_counters_agree_with_the_usage_of_the_answers():
    async with fake_server(metrics_compat=("vllm", "sglang")) as server:
        before = await scrape(server)
        bodies = [await server.complete(f"p{i}", max_tokens=3 + i) for i in range(5)]
        after = await scrape(server)

        def grown(name, **labels):
            key = (name, frozenset(labels.items()))
            return after[key] - before.get(key, 0)

        usages = [body["usage"] for body in bodies]
        for family in ("vllm", "sglang"):
            for tokens, field in (("prompt", "prompt_tokens"), ("generation", "completion_tokens")):
                assert grown(f"{family}:{tokens}_tokens_total") == sum(u[field] for u in usages)
        assert grown("vllm:request_success_total", finished_reason="length") == 5
        assert grown("sglang:num_requests_total") == 5
        assert grown("vllm:time_to_first_token_seconds_count") == 5
        assert grown("vllm:request_queue_time_seconds_count") == 5
        queued, first = (
            grown("vllm:request_queue_time_seconds_sum"),
            grown("vllm:time_to_first_token_seconds_sum"),
        )
        assert 0 <= queued <= first
        # One interval fewer than tokens, per request.
        intervals = sum(usage["completion_tokens"] - 1 for usage in usages)
        assert grown("vllm:inter_token_latency_seconds_count") == intervals
        assert after["vllm:num_requests_running", frozenset()] == 0


async def test_aborted_requests_are_counted_with_the_finished_ones():
    async with fake_server() as server:
        for i in range(10):
            body = {"prompt": f"p{i}", "max_tokens": 1500 if i % 2 else 3, "stream": True}
            async with server.client.post(server.url + "/v1/completions", json=body) as answer:
                if i % 2:
                    await answer.content.readline()
                    answer.close()
                else:
                    await answer.read()
        await server.wait_idle()
        found = await scrape(server)
        by_reason = {
            dict(labels)["finished_reason"]: value
            for (name, labels), value in found.items()
            if name == "loomserve:requests_total"
        }
        assert by_reason == {"stop": 0, "length": 5, "abort": 5, "timeout": 0, "error": 0}


async def test_histogram_buckets_add_up():
    async with fake_server() as server:
        await server.complete(max_tokens=20)
        found = await scrape(server)
        buckets = [
            (float(dict(labels)["le"]), value)
            for (name, labels), value in found.items()
            if name == "loomserve:inter_token_latency_seconds_bucket"
        ]
        counts = [value for _, value in sorted(buckets)]
        assert counts == sorted(counts)
        assert counts[-1] == found["loomserve:inter_token_latency_seconds_count", frozenset()] == 19


async def test_debug_endpoints_hold_figures_and_no_text():
    slow = fake_runner(step_seconds=lambda batch: 0.005)
    async with fake_server(runner=slow) as server:
        body = {"prompt": "my secret", "max_tokens": 200, "stream": True}
        async with server.client.post(server.url + "/v1/completions", json=body) as answer:
            await answer.content.readline()
            _, live = await server.get("/debug/requests")
            assert [one["input_tokens"] for one in live["requests"]] == [9]
            assert "secret" not in json.dumps(live)
        await server.wait_idle()
        _, steps = await server.get("/debug/steps?last=3")
        assert len(steps["steps"]) == 3
        assert steps["total"] == server.service.engine.records.total
        for record in steps["steps"]:
            assert record["planned_s"] <= record["launched_s"] <= record["done_s"]
        assert (await server.get("/debug/steps?last=x"))[0] == 400
        status, info = await server.get("/server_info")
        assert status == 200
        assert info["runner"] == {"device": "simulation"}
