"""How requests end: tokens, texts, aborts, time-outs."""

from __future__ import annotations

import pytest

from runtime.request import Finish, FinishReason
from runtime.runner import StepOutput
from tests.runtime.scheduling.scheduler_harness import EOS, Driver, config, request
from tests.values import present


class TestEndings:
    @pytest.mark.parametrize("least", [0, 1, 3])
    def test_a_stop_token_counts_behind_min_tokens(self, least: int) -> None:
        driver = Driver(config(eos_token_ids=frozenset([EOS])), script=lambda name, index: EOS)
        driver.add(request("r", 5, 9, min_tokens=least))
        driver.run()
        assert driver.reason("r") == "stop"
        assert len(driver.tokens["r"]) == least + 1

    def test_a_text_stop_on_the_last_allowed_token_overrides_length(self) -> None:
        driver = Driver()
        driver.add(request("r", 5, 3))
        while not driver.ended:
            driver.step()
        assert driver.reason("r") == "length"
        assert driver.scheduler.finish("r", Finish(FinishReason.STOP, "END"))
        assert driver.ended["r"].request.finish == Finish(FinishReason.STOP, "END")
        assert driver.scheduler.statistics().counters.finished == {"length": 0, "stop": 1}
        driver.plan()
        assert not driver.scheduler.finish("r", Finish(FinishReason.STOP, "END")), "final now"

    def test_a_text_stop_ends_after_the_steps_in_flight_without_an_output(self) -> None:
        driver = Driver()
        driver.add(request("r", 5, 50))
        for _ in range(5):
            driver.step()
        given = list(driver.tokens["r"])
        assert driver.scheduler.finish("r", Finish(FinishReason.STOP, "END"))
        plan = driver.plan()
        assert plan.ended == []
        driver.run()
        assert driver.tokens["r"] == given
        made = driver.batches[0].requests[0]
        assert made.finish == Finish(FinishReason.STOP, "END")
        assert driver.scheduler.statistics().cached_tokens == 5 + len(given) - 1
        driver.assert_all_free()

    def test_abort_all(self) -> None:
        driver = Driver(config(max_running_requests=2))
        driver.add(*[request(f"r{i}", 70, 9) for i in range(5)])
        driver.step()
        driver.step()
        assert driver.scheduler.abort_all("shutting down") == 5
        driver.run()
        assert {present(driver.ended[f"r{i}"].finish).message for i in range(5)} == {
            "shutting down"
        }
        driver.assert_all_free()

    @pytest.mark.parametrize("limit", ["deadline", "waiting", "running"])
    def test_time_outs(self, limit: str) -> None:
        driver = Driver(
            config(
                max_running_requests=1,
                waiting_timeout_s=0.5 if limit == "waiting" else 0.0,
                running_timeout_s=0.5 if limit == "running" else 0.0,
            )
        )
        deadline_s = 0.5 if limit == "deadline" else None
        driver.add(request("first", 5, 100, deadline_s=deadline_s))
        driver.add(request("second", 5, 2))
        driver.run()
        slow = "second" if limit == "waiting" else "first"
        assert driver.reason(slow) == "timeout"
        assert "after 0.5" in present(present(driver.ended[slow].finish).message)
        assert driver.ended[slow].request.arrival_s + 0.52 >= 0.5
        other = "first" if slow == "second" else "second"
        assert driver.reason(other) == "length"
        driver.assert_all_free()

    def test_steps_are_committed_in_order(self) -> None:
        driver = Driver()
        driver.add(request("r", 5, 5))
        driver.plan()
        second = present(driver.plan().batch)
        with pytest.raises(Exception, match="not the oldest"):
            driver.scheduler.commit(second, StepOutput([1]), 0.0)


class TestDeadlineBook:
    def test_answers_long_given_are_not_kept_until_their_deadline(self) -> None:
        driver = Driver(checked=False)
        for i in range(2500):
            driver.add(request(f"r{i}", 3, 1, deadline_s=1e9))
            if i % 8 == 7:
                driver.run()
        assert len(driver.scheduler._life._deadlines._heap) <= 1100
