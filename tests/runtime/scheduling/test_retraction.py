"""Who gives way for want of KV, and how that is kept rare."""

from __future__ import annotations

import random

import pytest

from runtime.scheduling.retraction import NewTokenRatio, choose_victims
from runtime.scheduling.scheduler import Scheduler
from tests.runtime.scheduling.fake_device import scripted_token
from tests.runtime.scheduling.scheduler_harness import Driver, config, request
from tests.values import present


class TestRetraction:
    def test_each_of_those_that_go_together_is_counted(self) -> None:
        """Prompts that are shared give nothing back, so several must go for one row's next token."""
        most = 0
        for outputs in range(70, 95, 5):
            driver = Driver(config(schedule_conservativeness=0.0, clip_max_new_tokens=1))
            first = request("first", 100, 98)
            driver.add(first)
            while len(first.output_ids) < outputs:
                driver.step()
            others = [request(f"r{i}", first.input_ids.tolist(), 30) for i in range(5)]
            driver.add(*others)
            counters = driver.scheduler.counters
            while driver.scheduler.has_unfinished:
                before = counters.retractions
                driver.step()
                most = max(most, counters.retractions - before)
            assert counters.retractions == sum(made.retractions for made in [first, *others])
        assert most > 1

    def test_ratio_follows_its_formula(self) -> None:
        ratio = NewTokenRatio(1.0)
        assert ratio.value == 0.7
        for _ in range(600):
            ratio.decay()
        assert ratio.value == pytest.approx(0.098)
        ratio.decay()
        assert ratio.value == pytest.approx(0.098)
        staying = [request("a", 5), request("b", 5)]
        for made, decoded in zip(staying, (30, 50), strict=True):
            made.launched_tokens, made.max_new_tokens = decoded, 200
        ratio.after_retraction(staying)
        assert ratio.value == pytest.approx((30 + 50 + 2 * 20) / (400 + 1))
        ratio.reset()
        assert ratio.value == 0.7
        ratio.after_retraction(staying)
        assert ratio.value == 0.7, "never lowered by a retraction"
        assert NewTokenRatio(2.0).value == 1.0

    def test_fewest_outputs_go_first_then_the_longest_input_then_the_newest(self) -> None:
        scheduler = Scheduler(config(capacity_tokens=1001))
        # id: (input tokens, output tokens)
        shapes = {"oldest": (5, 1), "b": (10, 3), "c": (20, 3), "d": (20, 3), "e": (5, 9)}
        made = []
        for name, (inputs, outputs) in shapes.items():
            item = request(name, inputs, 50)
            scheduler.add(item, 0.0)
            item.launched_tokens = outputs
            made.append(item)
        memory = scheduler._memory
        memory.allocate(scheduler.config.usable_tokens // memory.page_size)
        victims, hopeless = choose_victims(made, None, memory)
        assert [victim.request_id for victim in victims] == ["d", "c", "b", "e"]
        assert hopeless is made[0]

    def test_the_last_one_that_cannot_go_on_ends_with_an_error(self) -> None:
        driver = Driver(config(page_size=4, capacity_tokens=84), overlap=False, checked=False)
        driver.add(request("r", 8, 20))
        driver.step()
        driver.scheduler._memory.allocate(driver.scheduler.statistics().free_tokens // 4)
        driver.run()
        assert driver.reason("r") == "error"
        assert "no page left" in present(present(driver.ended["r"].finish).message)

    def test_a_pending_chunk_is_a_victim_before_any_row_ends(self) -> None:
        driver = Driver(config(schedule_conservativeness=0.0, chunked_prefill_size=16))
        driver.add(request("old", 20, 150))
        for _ in range(6):
            driver.step()
        # Its forecast fits what is free now; the old row's next tokens are not reserved for.
        driver.add(request("long", 130, 1))
        driver.run()
        assert driver.tokens["old"] == [scripted_token("old", i) for i in range(150)]
        assert driver.reason("long") == "length"
        driver.assert_all_free()

    def test_nothing_is_streamed_twice_and_the_answer_is_the_same(self) -> None:
        driver = Driver(config(capacity_tokens=101, schedule_conservativeness=0.0))
        driver.add(*[request(f"r{i}", 15, 40) for i in range(4)])
        driver.run()
        assert driver.scheduler.counters.retractions
        for i in range(4):
            assert driver.tokens[f"r{i}"] == [scripted_token(f"r{i}", k) for k in range(40)]

    def test_a_pass_that_retracted_admits_nobody(self) -> None:
        driver = Driver(config(capacity_tokens=101, schedule_conservativeness=0.0), overlap=False)
        driver.add(*[request(f"r{i}", 15, 40) for i in range(6)])
        while driver.scheduler.has_unfinished:
            before = driver.scheduler.counters.retractions
            plan = driver.step()
            if driver.scheduler.counters.retractions > before and plan.batch:
                assert not plan.batch.num_prefill
        assert driver.scheduler.counters.retractions

    def test_rows_are_retracted_only_when_their_newest_tokens_are_known(self) -> None:
        driver = Driver(config(capacity_tokens=101, schedule_conservativeness=0.0))
        driver.add(*[request(f"r{i}", 15, 40) for i in range(4)])
        reasons = []
        while driver.scheduler.has_unfinished:
            before = driver.scheduler.counters.retractions
            in_flight = len(driver.in_flight)
            reasons.append(driver.plan().reason)
            if driver.scheduler.counters.retractions > before:
                assert not in_flight
            while len(driver.in_flight) > (reasons[-1] == ""):
                driver.commit()
        assert "wait_commit" in reasons


class TestKnownOutputLength:
    """`ignore_eos` with the prefix cache off: the admission path that walks lifetimes."""

    def test_a_request_is_admitted_if_every_end_leaves_room_for_the_rest(self) -> None:
        driver = Driver(config(disable_radix_cache=True, capacity_tokens=161))
        driver.add(
            request("a", 20, 20, ignore_eos=True),
            request("b", 20, 60, ignore_eos=True),
        )
        driver.step()
        driver.add(request("c", 20, 50, ignore_eos=True))
        driver.step()
        # 190 tokens in all at the end of the longest, but a gives its 40 back long before.
        assert driver.scheduler.statistics().running == 3
        driver.run()
        assert driver.scheduler.counters.retractions == 0

    def test_it_waits_where_the_pool_would_run_dry_on_the_way(self) -> None:
        driver = Driver(config(disable_radix_cache=True, capacity_tokens=101))
        driver.add(request("a", 20, 30, ignore_eos=True), request("b", 20, 40, ignore_eos=True))
        driver.step()
        assert driver.scheduler.statistics().running == 1
        assert driver.scheduler.statistics().reason == "kv_total"
        driver.run()
        assert driver.scheduler.counters.retractions == 0

    @pytest.mark.parametrize("page_size", [1, 16])
    def test_random_loads_of_known_length_are_never_retracted(self, page_size: int) -> None:
        """Lengths are known, so nothing has to be thrown back where pages hold one token; with
        larger pages the last ones are only partly used, and few are."""
        rng = random.Random(page_size)
        driver = Driver(
            config(
                disable_radix_cache=True,
                page_size=page_size,
                capacity_tokens=40 * 16,
                max_running_requests=16,
            )
        )
        for i in range(60):
            driver.add(request(f"r{i}", rng.randint(1, 100), rng.randint(1, 80), ignore_eos=True))
        driver.run()
        assert driver.scheduler.counters.retractions <= (0 if page_size == 1 else 6)
        driver.assert_all_free()
