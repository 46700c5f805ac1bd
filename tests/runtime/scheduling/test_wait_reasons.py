"""Every wait is charged to the term that caused it, and to nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.scheduling.accounting import BLOCKING_TERMS
from runtime.scheduling.prefill_delayer import PrefillDelayer
from tests.runtime.scheduling.scheduler_harness import Driver, config, request


def waited(driver: Driver, name: str) -> dict[str, float]:
    made = driver.ended[name].request
    return {term: round(s, 6) for term, s in driver.scheduler.waited_seconds(made).items()}


def test_slots() -> None:
    driver = Driver(config(max_running_requests=1))
    driver.add(request("a", 5, 10), request("b", 5, 2))
    driver.step()
    debug = {item.request_id: item for item in driver.scheduler.requests}
    assert debug["a"].blocked_by == ""
    assert debug["b"].blocked_by == "rows"
    assert driver.scheduler.statistics().full
    driver.run()
    assert waited(driver, "a") == {}
    terms = waited(driver, "b")
    assert set(terms) == {"rows"}
    assert terms["rows"] == pytest.approx(0.1, abs=0.021)


def test_kv_total() -> None:
    driver = Driver(config())
    driver.add(request("a", 100, 60), request("b", 60, 20))
    driver.step()
    driver.run()
    assert set(waited(driver, "b")) <= {"chunk_budget", "kv_total"}
    assert waited(driver, "b")["kv_total"] > 0.1


def test_chunk_budget_and_input_budget() -> None:
    driver = Driver(config())
    driver.add(request("a", 150, 2), request("b", 20, 2))
    driver.run()
    assert set(waited(driver, "b")) == {"chunk_budget"}
    driver = Driver(config(chunked_prefill_size=0, max_prefill_tokens=100))
    driver.add(request("a", 150, 2), request("b", 20, 2))
    driver.run()
    assert set(waited(driver, "b")) == {"input_budget"}


def test_request_cap_is_policy() -> None:
    driver = Driver(config(max_prefill_requests=1))
    driver.add(*[request(f"r{i}", 5, 2) for i in range(3)])
    driver.run()
    assert waited(driver, "r1") == {"policy": 0.01}
    assert waited(driver, "r2") == {"policy": 0.02}


def test_a_twins_wait_is_its_own() -> None:
    driver = Driver(config(page_size=16, capacity_tokens=6400, chunked_prefill_size=512))
    prefix = list(range(100, 300))
    driver.add(
        request("a", [*prefix, 1], 2),
        request("twin", [*prefix, 2], 2),
        request("other", 30, 2),
    )
    driver.step()
    debug = {item.request_id: item for item in driver.scheduler.requests}
    assert debug["twin"].blocked_by == "shared_prefix"
    driver.run()
    assert waited(driver, "twin") == {"shared_prefix": 0.01}
    assert waited(driver, "other") == {}
    assert driver.scheduler.statistics().wait_seconds["shared_prefix"] == pytest.approx(0.01)
    assert driver.ended["twin"].request.cached_tokens == 192


def test_a_stalled_chunk_waits_for_kv_step() -> None:
    # Two rows and two prefill tokens a step: at the end two tokens are left for the rows alone.
    driver = Driver(
        config(schedule_conservativeness=0.0, chunked_prefill_size=4, capacity_tokens=202)
    )
    driver.add(request("old1", 20, 75), request("old2", 20, 75))
    while driver.scheduler.statistics().running < 2:
        driver.step()
    driver.add(request("long", 100, 1))
    blocked = set()
    while driver.scheduler.has_unfinished:
        driver.step()
        blocked |= {i.blocked_by for i in driver.scheduler.requests if i.state == "prefilling"}
    assert blocked == {"", "kv_step"}
    assert driver.ended["long"].request.retractions == 1, "the rows come first"
    terms = waited(driver, "long")
    assert terms["kv_step"] == 0.01
    assert set(terms) == {"kv_step", "retracted", "kv_total"}


def test_a_wait_before_the_next_pass_is_nobodys_fault() -> None:
    driver = Driver()
    driver.add(request("a", 5, 20))
    driver.step()
    driver.now += 0.004
    driver.add(request("b", 5, 2))
    driver.now += 0.003
    driver.run()
    assert waited(driver, "b") == {"next_pass": 0.003}


def test_the_terms_add_up_to_the_whole_wait() -> None:
    driver = Driver(config(capacity_tokens=101, schedule_conservativeness=0.0))
    made = [request(f"r{i}", 15, 40) for i in range(6)]
    spans: dict[str, float] = {item.request_id: 0.0 for item in made}
    driver.add(*made)
    while driver.scheduler.has_unfinished:
        waiting = {i.request_id for i in driver.scheduler.requests if i.state == "waiting"}
        before = driver.now
        driver.step()
        for name in waiting & {
            i.request_id for i in driver.scheduler.requests if i.state == "waiting"
        }:
            spans[name] += driver.now - before
    assert driver.scheduler.counters.retractions
    for item in made:
        total = sum(driver.scheduler.waited_seconds(item).values())
        # A pass that admits or retracts splits one turn of 10 ms.
        assert total == pytest.approx(spans[item.request_id], abs=0.011 * (1 + item.retractions))


def test_every_term_has_a_name_and_a_clock() -> None:
    names = [term.value for term in BLOCKING_TERMS]
    contract = [
        "rows",
        "kv_total",
        "kv_step",
        "input_budget",
        "chunk_budget",
        "delayer",
        "policy",
        "grammar",
        "retracted",
    ]
    assert set(contract) <= set(names)
    assert set(Driver().scheduler.statistics().wait_seconds) == set(names)


class TestDelayer:
    def ask(self, delayer: PrefillDelayer, now: float = 0.0, **changes: float) -> bool:
        state: dict[str, Any] = {
            "waiting": 1,
            "running": 16,
            "free_rows": 8,
            "kv_usage": 0.9,
            **changes,
        }
        return delayer.allow(now, **state)

    @pytest.fixture
    def delayer(self) -> PrefillDelayer:
        made = PrefillDelayer(config(delayer_max_passes=5))
        made.finalize(4)  # the recent largest batch
        return made

    def test_waits_for_company(self, delayer: PrefillDelayer) -> None:
        # min(16 * 0.25, 4) = 4 must be waiting
        assert not self.ask(delayer, waiting=3)
        assert self.ask(delayer, waiting=4)

    def test_waits_for_as_many_slots_as_the_largest_batch(self, delayer: PrefillDelayer) -> None:
        assert not self.ask(delayer, waiting=9, free_rows=3)
        assert self.ask(delayer, waiting=9, free_rows=4)

    def test_an_under_used_pool_is_filled(self, delayer: PrefillDelayer) -> None:
        assert self.ask(delayer, kv_usage=0.29)

    def test_never_delays_when_nothing_runs_or_nothing_waits(self, delayer: PrefillDelayer) -> None:
        assert self.ask(delayer, running=0)
        assert self.ask(delayer, waiting=0)

    def test_gives_in_after_its_passes(self, delayer: PrefillDelayer) -> None:
        answers = []
        for _ in range(7):
            answers.append(self.ask(delayer))
            delayer.finalize(0)
        assert answers == [False] * 5 + [True] * 2
        delayer.finalize(1)
        assert not self.ask(delayer, running=4, waiting=0.5), "a prefill starts the count anew"

    def test_gives_in_after_its_time(self, delayer: PrefillDelayer) -> None:
        assert not self.ask(delayer, now=1.0)
        assert not self.ask(delayer, now=5.9)
        assert self.ask(delayer, now=6.0)

    def test_in_the_scheduler_it_delays_new_prompts_and_never_a_pending_chunk(self) -> None:
        driver = Driver(
            config(
                enable_prefill_delayer=True,
                delayer_low_watermark=0.0,
                capacity_tokens=2001,
                max_running_requests=6,
            )
        )
        driver.add(*[request(f"r{i}", 5, 60) for i in range(4)])
        driver.step()
        driver.add(request("alone", 200, 2))
        for _ in range(31):
            driver.step()
        kinds = [batch.kind for batch in driver.batches]
        assert kinds == ["prefill"] + ["decode"] * 30 + ["mixed"]
        driver.run()
        chunks = [batch.step for batch in driver.batches if batch.kind == "mixed"]
        assert chunks == list(range(31, 31 + len(chunks)))
        assert waited(driver, "alone") == {"delayer": 0.3}
