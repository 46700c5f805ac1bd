"""What may enter the queue, and who makes room in it."""

from __future__ import annotations

import pytest

from runtime.errors import ContextTooLong, InvalidRequest, QueueFull
from runtime.scheduling.scheduler import Scheduler
from tests.runtime.scheduling.scheduler_harness import Driver, config, request
from tests.values import present


class TestIntake:
    def test_what_can_never_fit_the_pool_is_refused_with_all_the_numbers(self) -> None:
        scheduler = Scheduler(config(page_size=16, capacity_tokens=17 * 16))
        with pytest.raises(ContextTooLong, match=r"200 input tokens.*16.*40 output.*264.*256"):
            scheduler.add(request("r", 200, 40), 0.0)
        assert not scheduler.has_unfinished

    def test_what_exceeds_the_context_is_refused(self) -> None:
        scheduler = Scheduler(config(context_length=100))
        with pytest.raises(ContextTooLong, match=r"100 tokens.*90 input.*11 output.*101"):
            scheduler.add(request("r", 90, 11), 0.0)
        scheduler.add(request("r", 90, 10), 0.0)

    @pytest.mark.parametrize(
        ("context", "expected"),
        # 200 usable tokens - 50 of input - a page, and one fewer: equality would be refused
        [(4096, 148), (100, 50)],
        ids=["the pool bounds", "the context bounds"],
    )
    def test_no_max_tokens_means_what_context_and_pool_allow(
        self, context: int, expected: int
    ) -> None:
        driver = Driver(config(context_length=context))
        driver.add(request("r", 50, None))
        driver.run()
        assert len(driver.tokens["r"]) == expected
        assert driver.reason("r") == "length"

    def test_bad_requests_are_refused(self) -> None:
        scheduler = Scheduler(config())
        scheduler.add(request("r", 5), 0.0)
        with pytest.raises(InvalidRequest, match="in use"):
            scheduler.add(request("r", 5), 0.0)
        with pytest.raises(InvalidRequest, match="no tokens"):
            scheduler.add(request("s", []), 0.0)
        with pytest.raises(InvalidRequest, match=r"0; it must be at least 1"):
            scheduler.add(request("t", 5, 0), 0.0)

    def test_at_the_queue_cap_the_lowest_priority_goes(self) -> None:
        driver = Driver(config(max_queued_requests=2))
        driver.add(request("low", 5, priority=1), request("mid", 5, priority=2))
        with pytest.raises(QueueFull, match=r"2 requests are waiting.*takes 2") as full:
            driver.add(request("other", 5, priority=1))
        assert full.value.retry_after_s >= 1.0
        driver.add(request("high", 5, priority=3))
        assert driver.reason("low") == "error"
        assert present(driver.ended["low"].finish).matched == "queue_full"
        driver.run()
        assert driver.reason("mid") == driver.reason("high") == "length"

    def test_a_group_displaces_nobody_unless_all_of_it_gets_in(self) -> None:
        driver = Driver(config(max_queued_requests=3))
        low = [request(f"low{i}", 5, priority=0) for i in range(2)]
        driver.add(*low, request("high", 5, priority=9))
        group = [request(f"choice{i}", 5, priority=5) for i in range(3)]
        with pytest.raises(QueueFull, match=r"3 requests are waiting.*takes 3"):
            driver.scheduler.add_group(group, driver.now)
        assert driver.scheduler.statistics().waiting == 3
        assert not any(item.finish for item in low)
        driver.collect(driver.scheduler.add_group(group[:2], driver.now))
        assert driver.reason("low0") == driver.reason("low1") == "error"
        driver.run()
        ends = [driver.reason(name) for name in ("high", "choice0", "choice1")]
        assert ends == ["length"] * 3

    def test_a_group_with_one_bad_request_is_refused_whole(self) -> None:
        driver = Driver()
        good = request("good", 5)
        for bad, error in (
            (request("bad", []), "no tokens"),
            (request("good", 5), "in use"),
            (request("bad", 5000), "maximum context length"),
        ):
            with pytest.raises(InvalidRequest, match=error):
                driver.scheduler.add_group([good, bad], 0.0)
            assert not driver.scheduler.has_unfinished

    def test_a_group_larger_than_the_queue_is_no_matter_of_trying_again(self) -> None:
        driver = Driver(config(max_queued_requests=2))
        group = [request(f"choice{i}", 5) for i in range(3)]
        with pytest.raises(InvalidRequest, match="asks for 3 sequences; the queue takes at most 2"):
            driver.scheduler.add_group(group, 0.0)

    def test_who_is_about_to_end_takes_no_place_in_the_queue(self) -> None:
        driver = Driver(config(max_queued_requests=2))
        driver.add(request("a", 5, priority=1), request("b", 5, priority=1))
        assert driver.scheduler.abort("a")
        driver.add(request("c", 5, priority=1))
        assert not driver.ended, "the aborted one left its place free"
        with pytest.raises(QueueFull, match=r"2 requests are waiting"):
            driver.add(request("d", 5, priority=1))
        driver.add(request("e", 5, priority=2))
        assert list(driver.ended) == ["c"], "the newest that would go on waiting"
        driver.run()
        assert {name: driver.reason(name) for name in "abce"} == {
            "a": "abort",
            "b": "length",
            "c": "error",
            "e": "length",
        }
