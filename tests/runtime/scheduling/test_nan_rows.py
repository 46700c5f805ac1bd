"""A row whose logits hold a NaN: it ends alone, and nothing of it stays cached; and who has read
from the cache is only a suspect until it was retried in isolation."""

from __future__ import annotations

import pytest

from tests.runtime.scheduling.fake_device import scripted_token
from tests.runtime.scheduling.scheduler_harness import (
    Driver,
    assert_answers,
    config,
    names,
    request,
)
from tests.values import present


class TestNanRows:
    @pytest.mark.parametrize("chunks", [1, 3])
    def test_the_prompt_of_a_nan_row_is_not_cached(self, chunks: int) -> None:
        driver = Driver(config(capacity_tokens=2001), overlap=False)
        shared = list(range(5000, 5030))
        driver.add(request("before", shared, 1))
        driver.run()
        prompt = [*shared, *range(6000, 6000 + 64 * chunks)]
        driver.device.spoilers["bad"] = None
        driver.add(request("bad", prompt, 5))
        driver.run()
        assert driver.ended["bad"].request.retractions == 1, "it had read what another computed"
        assert present(driver.ended["bad"].finish).message == "a NaN among the logits"
        driver.add(request("again", prompt, 5))
        driver.run()
        again = driver.ended["again"].request
        assert again.cached_tokens == len(shared), "only what another has computed"
        assert_answers(driver, {"again": 5})
        driver.assert_all_free()

    def test_nor_what_it_has_computed_before_it_made_way(self) -> None:
        driver = Driver(config(capacity_tokens=2001, max_running_requests=1), overlap=False)
        prompt = list(range(6000, 6000 + 150))
        driver.add(request("bad", prompt, 5))
        driver.step()
        driver.add(request("high", 20, 1, priority=100))
        driver.step()
        bad = driver.scheduler._life.live["bad"]
        assert bad.retractions == 1
        while driver.reason_or_none("bad") is None:
            batch = present(driver.plan().batch)
            last = "bad" in names(batch) and batch.sampled
            driver.commit(failed=[0] if last else [])
        assert bad.scheduling.admissions == 3, "the last time isolated"
        driver.add(request("again", prompt, 5))
        driver.run()
        assert driver.ended["again"].request.cached_tokens == 0
        driver.assert_all_free()

    @pytest.mark.parametrize("steps", [0, 1], ids=["in flight", "not in flight"])
    def test_who_was_built_on_it_starts_anew(self, steps: int) -> None:
        """z is admitted on what x puts into the cache when its last chunk is launched."""
        driver = Driver(config(capacity_tokens=2001, disable_mixed_chunk=True))
        prefix = list(range(100, 160))
        driver.add(request("x", prefix, 5))
        driver.plan()
        driver.add(request("z", [*prefix, 1, 2], 5))
        assert names(driver.plan().batch) == ["z"]
        z = driver.in_flight[-1][0].requests[0]
        assert z.cached_tokens == 60
        driver.commit(failed=[0])
        assert driver.reason("x") == "error"
        if steps:
            driver.commit()
        assert driver.tokens["z"] == []
        driver.run()
        assert z.retractions == 1
        assert_answers(driver, {"z": 5})
        driver.assert_all_free()

    @pytest.mark.parametrize("steps", [1, 2])
    def test_who_has_its_pages_in_the_place_of_its_own_starts_anew(self, steps: int) -> None:
        """x and y compute the same prompt side by side, and y's pages give way to x's."""
        prefix = list(range(100, 124))
        driver = Driver(config(page_size=8, capacity_tokens=800, chunked_prefill_size=128))
        driver.add(request("x", [*prefix, 1], 20), request("y", [*prefix, 2], 20))
        for _ in range(steps):
            driver.plan()
        x, y = driver.in_flight[0][0].requests
        assert x.pages[:3] == y.pages[:3]
        driver.commit(failed=[0])
        driver.run()
        assert driver.reason("x") == "error"
        assert y.retractions == 1
        assert_answers(driver, {"y": 20})
        driver.assert_all_free()

    def test_who_has_read_it_keeps_what_it_had_computed_before(self) -> None:
        """x goes on with y's pages in the place of its own; that its row then gives NaN says
        nothing of its first piece, which y has only read."""
        driver = Driver(
            config(page_size=4, capacity_tokens=800, chunked_prefill_size=8, prefill_share=0.9)
        )
        driver.device.spoilers["y"] = None
        x = request("x", range(100, 124), 5)
        y = request("y", [*range(100, 116), 7], 5)
        driver.add(x)
        driver.plan()
        driver.scheduler.change_options(chunked_prefill_size=20)
        driver.add(y)
        assert names(driver.plan().batch) == ["x", "y"]
        driver.commit()
        assert names(driver.plan().batch) == ["x", "y"]
        assert x.pages[2:4] == y.pages[2:4]
        driver.run()
        assert driver.reason("y") == "error"
        assert (x.retractions, x.scheduling.prefix_tokens) == (1, 8)
        assert_answers(driver, {"x": 5})
        driver.assert_all_free()

    def test_it_starts_anew_once_though_another_row_fails_as_it_returns(self) -> None:
        driver = Driver(config(capacity_tokens=2001))
        prefix = list(range(100, 160))
        driver.add(request("other", 5, 9))
        driver.step()
        driver.add(request("x", prefix, 5))
        driver.step()
        driver.add(request("z", [*prefix, 1, 2], 5))
        assert names(driver.plan().batch) == ["z", "other", "x"]
        driver.commit(failed=[0])
        driver.commit(failed=[1])
        assert (driver.reason("x"), driver.reason("other")) == ("error", "error")
        driver.run()
        assert driver.ended["z"].request.retractions == 1
        assert_answers(driver, {"z": 5})
        driver.assert_all_free()

    @pytest.mark.parametrize("cached", [0, 30])
    def test_a_decoding_nan_row_leaves_its_prompt(self, cached: int) -> None:
        """It has had a token from all that it reads, so it is no suspect of theirs, and ends at once."""
        driver = Driver(config(capacity_tokens=2001), overlap=False)
        prompt = list(range(100, 160))
        driver.add(request("before", [*prompt[:cached], 7], 1))
        driver.run()
        driver.add(request("bad", prompt, 5))
        driver.step()
        driver.plan()
        driver.commit(failed=[0])
        assert driver.reason("bad") == "error"
        assert driver.tokens["bad"] == [scripted_token("bad", 0)]
        driver.add(request("again", [*prompt, 7], 5))
        driver.run()
        assert driver.ended["again"].request.cached_tokens == 60
        assert_answers(driver, {"again": 5})


class TestWhatAPromptLeftBehind:
    """A prompt whose KV is NaN, and which leaves before its first token would have shown it."""

    def rubbish(self, driver: Driver, tokens: list[int], leaves: str = "abort") -> None:
        """Two pieces of it stay in the cache."""
        driver.device.spoilers["bad"] = None
        deadline = driver.now + 0.025 if leaves == "deadline" else None
        driver.add(request("bad", tokens, 5, deadline_s=deadline))
        for _ in range(3):
            driver.step()
        if leaves == "preempted":
            driver.add(request("high", 20, 1, priority=100))
            bad = driver.scheduler._life.live["bad"]
            while not bad.retractions:
                assert bad.finish is None
                driver.step()
        if leaves != "deadline":
            assert driver.scheduler.abort("bad")
        while driver.in_flight:
            driver.commit()
        driver.step()
        assert driver.reason("bad") == ("timeout" if leaves == "deadline" else "abort")

    @pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "synchronous"])
    @pytest.mark.parametrize("leaves", ["abort", "deadline", "preempted"])
    def test_fails_nobody_and_goes(self, leaves: str, overlap: bool) -> None:
        driver = Driver(config(capacity_tokens=2001, max_running_requests=1), overlap=overlap)
        tokens = list(range(6000, 6300))
        self.rubbish(driver, tokens, leaves)
        first = request("first", [*tokens[:100], *range(7000, 7040)], 5)
        driver.add(first)
        driver.run()
        assert (first.cached_tokens, first.retractions) == (100, 1)
        second = request("second", [*tokens[:100], *range(8000, 8040)], 5)
        driver.add(second)
        driver.run()
        assert second.retractions == 0
        assert_answers(driver, {"first": 5, "second": 5})
        driver.assert_all_free()

    @pytest.mark.parametrize("mixing", [True, False], ids=["mixed", "strict"])
    def test_fails_none_of_many(self, mixing: bool) -> None:
        driver = Driver(
            config(capacity_tokens=4001, chunked_prefill_size=256, disable_mixed_chunk=not mixing)
        )
        tokens = list(range(6000, 7000))
        self.rubbish(driver, tokens)
        many = [request(f"r{i}", [*tokens[:300], i], 9) for i in range(5)]
        driver.add(*many)
        driver.run()
        assert [made.retractions for made in many] == [1] * 5, (
            "who is retried in isolation is done with it"
        )
        assert_answers(driver, {f"r{i}": 9 for i in range(5)})
        later = request("later", [*tokens[:300], 9], 9)
        driver.add(later)
        driver.run()
        assert (later.cached_tokens, later.retractions) == (300, 0), "what they computed is cached"
        driver.assert_all_free()

    def test_but_what_others_have_tokens_from_stays(self) -> None:
        """The first piece was finite, and a request decodes from it."""
        driver = Driver(config(capacity_tokens=2001), overlap=False)
        tokens = list(range(6000, 6300))
        driver.add(request("bad", tokens, 5))
        driver.step()
        driver.device.spoilers["bad"] = None
        driver.step()
        driver.step()
        driver.scheduler.abort("bad")
        running = request("running", [*tokens[:64], 1], 60)
        driver.add(running)
        for _ in range(3):
            driver.step()
        reader = request("reader", [*tokens[:128], 2], 5)
        driver.add(reader)
        while not reader.output_ids:
            assert reader.finish is None
            driver.step()
        assert (reader.cached_tokens, reader.retractions, running.retractions) == (128, 1, 0)
        again = request("again", [*tokens[:128], 3], 5)
        driver.add(again)
        driver.run()
        assert (again.cached_tokens, again.retractions) == (128, 0), (
            "what the reader computed in isolation"
        )
        assert_answers(driver, {"running": 60, "reader": 5, "again": 5})
        driver.assert_all_free()

    def test_a_prompt_at_fault_costs_nobody_what_he_shares_with_it(self) -> None:
        """Sent again and again, before and behind those who read the same system prompt."""
        system = list(range(5000, 5100))
        driver = Driver(config(capacity_tokens=4001, chunked_prefill_size=256))
        driver.add(request("honest", [*system, 1], 1))
        driver.run()
        honest = [request(f"honest{i}", [*system, 10 + i], 9) for i in range(8)]
        for number, made in enumerate(honest):
            name = f"bad{number}"
            driver.device.spoilers[name] = None
            bad = request(name, [*system, *range(9000, 9150)], 5)
            driver.add(*((bad, made) if number % 2 else (made, bad)))
            for _ in range(3):
                driver.step()
        driver.run()
        for number, made in enumerate(honest):
            assert driver.reason(f"bad{number}") == "error"
            assert driver.ended[f"bad{number}"].request.retractions == 1, "retried once"
            assert (made.retractions, made.cached_tokens) == (0, 100)
        assert_answers(driver, {made.request_id: 9 for made in honest})
        driver.assert_all_free()

    def test_what_running_requests_have_tokens_from_stays_also_of_a_prompt_at_fault(self) -> None:
        """Its first piece was finite, as another shows that has started from it."""
        driver = Driver(config(capacity_tokens=2001), overlap=False)
        bad = request("bad", 600, 5)
        driver.add(bad)
        driver.step()
        running = request("running", [*bad.input_ids[:64], 1], 60)
        driver.add(running)
        while bad.finish is None:
            batch = present(driver.plan().batch)
            driver.commit([i for i, b in enumerate(batch.sampled) if batch.requests[b] is bad])
        assert len(running.output_ids) > 2
        assert bad.retractions == 0, "it has read nothing of others"
        again = request("again", [*bad.input_ids, 1], 5)
        driver.add(again)
        driver.run()
        assert (running.retractions, again.cached_tokens) == (0, 64)
        assert_answers(driver, {"running": 60, "again": 5})
        driver.assert_all_free()

    def test_who_is_retried_in_isolation_keeps_nobody_waiting(self) -> None:
        """Its twin need not wait for KV that does not come."""
        driver = Driver(config(capacity_tokens=4001), overlap=False)
        tokens = list(range(6000, 6400))
        self.rubbish(driver, tokens)
        alone = request("alone", [*tokens[:128], *range(300)], 5)
        driver.add(alone)
        while not alone.retractions:
            assert alone.finish is None
            driver.step()
        skips = driver.scheduler.counters.shared_prefix_skips
        twin = request("twin", alone.input_ids.tolist(), 5)
        driver.add(twin)
        driver.run()
        assert driver.scheduler.counters.shared_prefix_skips == skips
        assert_answers(driver, {"alone": 5, "twin": 5})
