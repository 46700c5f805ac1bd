"""Prompts that begin alike: what is cached of them when, and who computes it."""

from __future__ import annotations

import pytest

from runtime.scheduling.policies import POLICIES
from tests.runtime.scheduling.scheduler_harness import Driver, config, request


class TestCache:
    def test_a_prompt_is_shared_as_soon_as_its_last_chunk_is_launched(self) -> None:
        driver = Driver(config(page_size=16, capacity_tokens=1600))
        tokens = list(range(100, 160))
        driver.add(request("a", tokens, 5))
        driver.plan()
        second = request("b", tokens, 5)
        driver.add(second)
        driver.plan()
        assert second.cached_tokens == 48
        assert driver.in_flight[0][0].requests[0].request_id == "a", "not even committed"
        driver.run()

    def test_a_finished_answer_is_cached_but_for_its_last_token(self) -> None:
        driver = Driver(config())
        driver.add(request("a", 20, 5))
        driver.run()
        assert driver.scheduler.statistics().cached_tokens == 24
        driver.add(request("b", [*request("a", 20).input_ids, *driver.tokens["a"], 9], 1))
        driver.run()
        assert driver.ended["b"].request.cached_tokens == 24

    @pytest.mark.parametrize("policy", POLICIES)
    def test_twins_that_arrive_together_are_computed_once(self, policy: str) -> None:
        driver = Driver(
            config(
                page_size=16, capacity_tokens=6400, chunked_prefill_size=128, schedule_policy=policy
            )
        )
        prefix = list(range(100, 612))
        driver.add(*[request(f"r{i}", [*prefix, 9000 + i], 4) for i in range(8)])
        driver.run()
        computed = sum(batch.prefill_tokens for batch in driver.batches)
        assert computed == 512 + 8
        waits = driver.scheduler.waited_seconds(driver.ended["r1"].request)
        assert set(waits) <= {"chunk_budget", "shared_prefix", "next_pass"}

    @pytest.mark.parametrize(("page_size", "cached"), [(1, 63), (16, 48)])
    def test_one_token_is_left_to_compute(self, page_size: int, cached: int) -> None:
        driver = Driver(config(page_size=page_size, capacity_tokens=60 * 16))
        tokens = list(range(64))
        for name in "ab":
            driver.add(request(name, tokens, 1))
            driver.run()
        assert driver.ended["b"].request.cached_tokens == cached
        assert driver.batches[-1].prefill_tokens == 64 - cached

    def test_namespaces_do_not_share(self) -> None:
        driver = Driver()
        tokens = list(range(50))
        for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
            driver.add(request(name, tokens, 1, namespace=salt))
            driver.run()
        cached = [driver.ended[name].request.cached_tokens for name in "abc"]
        assert cached == [0, 0, 49]

    def test_prompt_logprobs_are_computed_not_matched(self) -> None:
        driver = Driver()
        tokens = list(range(50))
        driver.add(request("a", tokens, 1))
        driver.run()
        driver.add(request("b", tokens, 1, prompt_logprobs=0))
        driver.run()
        assert driver.ended["b"].request.cached_tokens == 0

    def test_flush_empties_an_idle_cache_only(self) -> None:
        driver = Driver()
        driver.add(request("a", 20, 2))
        driver.plan()
        assert not driver.scheduler.flush()
        driver.run()
        assert driver.scheduler.flush()
        assert driver.scheduler.statistics().free_tokens == 200


def test_a_use_is_an_admission_and_not_a_look_at_a_blocked_prompt() -> None:
    """Under lfu a prompt that waited for KV gave its prefix hundreds of hits."""
    driver = Driver(config(eviction_policy="lfu", schedule_conservativeness=1.0))
    often, once = list(range(5000, 5040)), list(range(6000, 6040))
    for name, prompt in (("a", often), ("b", often), ("c", often), ("d", once)):
        driver.add(request(name, [*prompt, 1], 1))
        driver.run()
    driver.add(request("running", 20, 60))
    driver.step()
    driver.add(request("blocked", [*once, 2], 150))
    for _ in range(30):
        driver.step()
    assert driver.scheduler.statistics().reason == "kv_total"
    driver.scheduler.abort("blocked")
    driver.run()
    driver.scheduler._memory.cache.evict(100)
    warm = request("warm", [*often, 3], 1)
    cold = request("cold", [*once, 3], 1)
    driver.add(warm, cold)
    driver.run()
    assert (warm.cached_tokens, cold.cached_tokens) == (40, 0)
