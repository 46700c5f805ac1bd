"""Preemption: whom it takes, and that nobody is pushed out unless who takes the place starts in that
very pass."""

from __future__ import annotations

import random

import pytest

from runtime.request import Request
from runtime.scheduling.policies import POLICIES
from tests.runtime.scheduling.fake_device import scripted_token
from tests.runtime.scheduling.scheduler_harness import Driver, config, request


def turn_until_started(driver: Driver, name: str, turns: int = 200) -> tuple[int | None, int]:
    """(the turn in which somebody was first preempted, the one in which `name` started)."""
    made = driver.scheduler._life.live[name]
    preempted = None
    for turn in range(turns):
        driver.step()
        if preempted is None and driver.scheduler.counters.preemptions:
            preempted = turn
        if made.row >= 0:
            return preempted, turn
    raise AssertionError(f"{name} has not started after {turns} turns")


class TestPriority:
    def test_larger_priorities_are_admitted_first(self) -> None:
        driver = Driver(config(max_running_requests=1))
        driver.add(*[request(f"p{p}", 5, 2, priority=p) for p in (1, 5, 3)])
        driver.run()
        assert list(driver.ended) == ["p5", "p3", "p1"]

    def test_a_gap_beyond_the_threshold_preempts_the_lowest_newest(self) -> None:
        driver = Driver(config(max_running_requests=3))
        driver.add(
            request("a", 5, 30, priority=0),
            request("b", 5, 30, priority=0),
            request("c", 5, 30, priority=4),
        )
        driver.step()
        driver.add(request("gap10", 5, 3, priority=10))
        driver.step()
        assert driver.scheduler.counters.preemptions == 0, "10 does not exceed 10"
        driver.add(request("gap11", 5, 3, priority=11))
        driver.run()
        assert driver.scheduler.counters.preemptions == 1
        assert driver.ended["b"].request.retractions == 1
        assert list(driver.ended).index("gap11") < list(driver.ended).index("gap10")
        for name in "abc":
            assert driver.tokens[name] == [scripted_token(name, i) for i in range(30)]

    def test_preemption_for_kv_takes_no_more_than_it_needs(self) -> None:
        driver = Driver(config(schedule_conservativeness=1.0))
        driver.add(*[request(f"low{i}", 30, 20) for i in range(3)])
        driver.step()
        driver.add(request("high", 60, 20, priority=50))
        driver.run()
        assert driver.scheduler.counters.preemptions == 1
        assert driver.ended["low2"].request.retractions == 1
        assert [driver.ended[f"low{i}"].request.retractions for i in range(2)] == [0, 0]

    def test_nobody_is_preempted_when_even_all_victims_would_not_do(self) -> None:
        driver = Driver(config())
        driver.add(request("mid", 130, 10, priority=45), request("low", 20, 10))
        driver.step()
        driver.add(request("high", 100, 20, priority=50))
        driver.run()
        assert driver.scheduler.counters.preemptions == 0

    def test_a_long_prompt_being_cut_yields_and_goes_on_where_it_was(self) -> None:
        driver = Driver(config(capacity_tokens=3001))
        driver.add(request("long", 1000, 2))
        for _ in range(4):
            driver.step()
        driver.add(request("urgent", 100, 2, priority=50))
        driver.run()
        assert list(driver.ended) == ["urgent", "long"]
        assert driver.scheduler.counters.preemptions == 1
        computed = sum(batch.prefill_tokens for batch in driver.batches)
        assert computed == 1100, "what was computed of the long prompt stayed in the cache"

    def test_preemption_can_be_off(self) -> None:
        driver = Driver(config(max_running_requests=1, disable_priority_preemption=True))
        driver.add(request("low", 5, 20))
        driver.step()
        driver.add(request("high", 5, 3, priority=99))
        driver.run()
        assert list(driver.ended) == ["low", "high"]


class TestWhoCannotStart:
    """A running row is not taken for somebody who has to wait all the same."""

    def loaded(self, chunk_priority: int, **options: object) -> Driver:
        """A running row and a pending chunk; no row is free."""
        driver = Driver(config(capacity_tokens=4096, max_running_requests=2, **options))
        driver.add(request("low", 16, 300))
        driver.step()
        driver.step()
        driver.add(request("chunk", 2000, 4, priority=chunk_priority))
        driver.step()
        driver.step()
        return driver

    def test_behind_a_pending_chunk_that_does_not_yield(self) -> None:
        driver = self.loaded(chunk_priority=100)
        driver.add(request("high", 50, 4, priority=100))
        preempted, started = turn_until_started(driver, "high")
        assert preempted == started

    def test_a_pending_chunk_that_blocks_yields_before_a_row(self) -> None:
        """Of lower priority than the row, the chunk alone makes way."""
        driver = self.loaded(chunk_priority=1)
        driver.add(request("high", 50, 4, priority=100))
        assert turn_until_started(driver, "high") == (1, 1)
        assert driver.scheduler._life.live["chunk"].retractions == 1
        assert driver.scheduler._life.live["low"].retractions == 0

    def test_a_short_prompt_does_not_go_ahead_of_a_chunk_that_matters_more(self) -> None:
        driver = self.loaded(chunk_priority=200, prefill_share=0.9)
        driver.add(request("high", 8, 4, priority=100))
        preempted, started = turn_until_started(driver, "high")
        assert preempted == started

    def test_waiting_for_its_twin(self) -> None:
        driver = self.loaded(chunk_priority=100)
        chunk = driver.scheduler._life.live["chunk"]
        driver.add(request("high", list(chunk.input_ids[:1990]), 4, priority=100))
        preempted, started = turn_until_started(driver, "high")
        assert preempted == started

    def test_who_may_preempt_is_not_held_by_the_delayer(self) -> None:
        driver = Driver(
            config(
                capacity_tokens=4096,
                max_running_requests=2,
                chunked_prefill_size=512,
                enable_prefill_delayer=True,
                delayer_low_watermark=0.0,
            )
        )
        driver.add(request("low", 16, 300), request("low2", 16, 300))
        driver.step()
        driver.step()
        driver.add(request("high", 50, 4, priority=100))
        assert turn_until_started(driver, "high") == (1, 1)

    @pytest.mark.parametrize(("priority", "at_once"), [(10, False), (11, True)])
    def test_who_is_no_more_above_than_the_threshold_is_held_by_it(
        self, priority: int, at_once: bool
    ) -> None:
        driver = Driver(
            config(
                capacity_tokens=4096,
                max_running_requests=16,
                chunked_prefill_size=512,
                enable_prefill_delayer=True,
                delayer_low_watermark=0.0,
            )
        )
        driver.add(*[request(f"low{i}", 16, 300) for i in range(8)])
        driver.step()
        driver.step()
        driver.add(made := request("high", 50, 4, priority=priority))
        driver.step()
        assert (made.row >= 0) == at_once

    def test_a_pass_that_retracted_preempts_nobody_since_it_admits_nobody(self) -> None:
        driver = Driver(config(schedule_conservativeness=0.0), overlap=False)
        driver.add(request("low0", 50, 90), request("low1", 50, 90))
        while driver.scheduler.statistics().free_tokens >= 2:
            driver.step()
        driver.add(request("high", 10, 4, priority=100))
        driver.step()
        counters = driver.scheduler.counters
        assert (counters.retractions, counters.preemptions) == (1, 0)
        assert driver.scheduler.statistics().reason == "retracted"

    def test_a_prefix_that_the_candidate_reads_is_not_what_a_victim_gives_back(self) -> None:
        """Both victims hold 100 tokens together; the candidate needs them too, and 60 more, of
        which 40 are free."""
        shared = list(range(5000, 5100))
        driver = Driver(config(max_running_requests=3, schedule_conservativeness=0.0))
        driver.add(request("low0", [*shared, 1], 9), request("mid", 40, 20, priority=95))
        driver.step()
        driver.step()
        driver.add(request("high", [*shared, *range(60)], 15, priority=100))
        for _ in range(3):
            driver.step()
        assert driver.scheduler.counters.preemptions == 0
        driver.run()

    @pytest.mark.parametrize("shared", [0, 1])
    def test_for_want_of_a_place_to_cut_behind_what_a_victim_leaves(self, shared: int) -> None:
        """The pending chunk ends in this step and leaves 64 tokens of it. From position 0 they reach a
        place where a prompt may be cut, but not from 128, which is where the candidate finds itself
        once the victim's outputs, which it goes on from, are cached."""
        driver = Driver(
            config(
                page_size=16,
                capacity_tokens=4096,
                max_running_requests=2,
                chunked_prefill_size=128,
                truncation_align_size=128,
            ),
            overlap=False,
        )
        low = request("low", 64, 300)
        driver.add(low)
        while len(low.output_ids) < 70:
            driver.step()
        driver.add(request("chunk", 256 + 50, 20, priority=100))
        driver.step()
        history = [*low.input_ids, *low.output_ids][: 128 if shared else 64]
        driver.add(request("high", [*history, *range(30_000, 30_500)], 4, priority=100))
        preempted, started = turn_until_started(driver, "high")
        assert preempted == started
        driver.run()


class TestTheOrderChangesMeanwhile:
    """Way is made for the one that one look at the queue finds first. A second look may find
    somebody else there who does not fit, and nobody would start."""

    def contest(self, *, outputs: int = 0, fillers: int = 0, **options: object) -> Driver:
        """Two rows run, `low` and one that does not yield, and two may push out `low`: `large`,
        which is older and would not fit beside the other row, and `small`, which would.

        Args:
            outputs: of `low`, which `large` holds too, behind the same prompt of 50 tokens. They
                enter the cache when `low` goes. 60 tokens of `small` are cached from the first.
        """
        values = {"capacity_tokens": 401, "max_running_requests": 2}
        driver = Driver(config(**{**values, **options}), overlap=False)
        cached = list(range(7000, 7060))
        driver.add(request("before", [*cached, 1], 1))
        driver.run()
        low = request("low", 50, 60)
        driver.add(low, request("peer", 100, 100, priority=100))
        while len(low.output_ids) < 20:
            driver.step()
        driver.add(*(request(f"filler{number}", 10, 4) for number in range(fillers)))
        shared = [*low.input_ids, *low.output_ids][: 50 + outputs] if outputs else []
        rest = range(30_000, 30_250 - len(shared))
        driver.add(request("large", [*shared, *rest], 100, priority=100))
        driver.add(request("small", [*cached, *range(20)], 4, priority=100))
        return driver

    def started(self, driver: Driver) -> set[str]:
        """Who starts in a pass that preempts."""
        batch = driver.step().batch
        assert driver.scheduler.counters.preemptions == 1
        assert batch is not None
        return {made.request_id for made in batch.requests} - {"peer"}

    def test_by_what_a_victim_leaves_in_the_cache(self) -> None:
        assert self.started(self.contest(outputs=20, schedule_policy="lpm")) == {"small"}

    def test_by_a_queue_that_becomes_too_long_for_its_policy(self) -> None:
        assert self.started(self.contest(fillers=126, schedule_policy="lpm")) == {"small"}

    def test_by_chance(self) -> None:
        preempting = 0
        for seed in range(12):
            driver = self.contest(schedule_policy="random", policy_seed=seed)
            preempted, started = turn_until_started(driver, "small")
            preempting += preempted is not None
            assert preempted in (None, started)
        assert preempting > 3


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("ignore_eos", [True, False], ids=["known length", "forecast"])
def test_preemption_and_admission_count_by_one_rule(cache: bool, ignore_eos: bool) -> None:
    """In every pass that preempts, somebody of that higher priority starts, and with one victim
    less it would not have."""
    rng = random.Random(7)
    preempting = 0
    for _ in range(25):
        driver = Driver(
            config(
                disable_radix_cache=not cache,
                max_running_requests=rng.randint(2, 6),
                schedule_conservativeness=rng.choice([0.0, 0.3, 1.0]),
                chunked_prefill_size=rng.choice([16, 64, 0]),
                page_size=1,
                schedule_policy=rng.choice(tuple(POLICIES)),
                policy_seed=rng.randint(0, 99),
            ),
            overlap=False,
            checked=False,
        )
        for turn in range(40):
            if rng.random() < 0.5:
                driver.add(_any_request(rng, f"r{turn}", ignore_eos=ignore_eos))
            before = driver.scheduler.counters.preemptions
            rows = {r.request_id for r in driver.scheduler._life.live.values() if r.row >= 0}
            batch = driver.step().batch
            if driver.scheduler.counters.preemptions > before:
                preempting += 1
                assert batch is not None
                started = [r for r in batch.requests if r.request_id not in rows]
                assert any(r.priority >= 50 for r in started)
            driver.scheduler.check()
    assert preempting > 10


def _any_request(rng: random.Random, name: str, *, ignore_eos: bool) -> Request:
    return request(
        name,
        rng.randint(1, 120),
        rng.randint(1, 60),
        priority=rng.choice([0, 0, 0, 50, 100]),
        ignore_eos=ignore_eos,
    )
