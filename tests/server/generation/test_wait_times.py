"""Why a request waited: in its usage where asked for, and as a histogram per blocking term."""

from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from tests.fakes import fake_server


async def wait_samples(server) -> dict[tuple[str, str], float]:
    """(sample name, term) to value, of loomserve:request_wait_seconds, buckets left out."""
    async with server.client.get(server.url + "/metrics") as answer:
        text = await answer.text()
    return {
        (sample.name, sample.labels["term"]): sample.value
        for family in text_string_to_metric_families(text)
        if family.name == "loomserve:request_wait_seconds"
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


async def test_one_row_makes_the_others_wait_for_slots():
    async with fake_server(scheduler={"max_running_requests": 1}) as server:
        body = {"prompt": "abc", "max_tokens": 8, "ignore_eos": True, "include_wait_times": True}
        found = await asyncio.gather(*(server.post("/v1/completions", body) for _ in range(4)))
        waits = [answer["usage"]["wait_seconds"] for status, answer in found if status == 200]
        assert len(waits) == 4
        assert sum(wait.get("rows", 0.0) > 0 for wait in waits) >= 3

        samples = await wait_samples(server)
        terms = {term for _, term in samples}
        assert "rows" in terms
        for term in terms:
            waited = [wait[term] for wait in waits if term in wait]
            assert samples["loomserve:request_wait_seconds_count", term] == len(waited)
            total = samples["loomserve:request_wait_seconds_sum", term]
            assert abs(total - sum(waited)) < 1e-6


async def test_usage_is_plain_unless_asked():
    async with fake_server() as server:
        _, answer = await server.post("/v1/completions", {"prompt": "abc", "max_tokens": 2})
        assert "wait_seconds" not in answer["usage"]
        status, answer = await server.post(
            "/v1/completions", {"prompt": "abc", "include_wait_times": 7}
        )
        assert status == 400
        assert answer["error"]["param"] == "include_wait_times"
