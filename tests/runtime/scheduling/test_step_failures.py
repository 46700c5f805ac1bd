"""A step that fails: nobody but who is guilty loses anything, and nothing of it stays cached."""

from __future__ import annotations

import pytest

from runtime.request import Finish, FinishReason, RequestState
from runtime.scheduling.radix_tree import Place
from tests.runtime.scheduling.fake_device import scripted_token
from tests.runtime.scheduling.naive_model import rows_of
from tests.runtime.scheduling.scheduler_harness import (
    Driver,
    assert_answers,
    config,
    names,
    request,
)
from tests.values import present


def holds(*guilty: str):
    """A step with one of these in it raises."""
    return lambda batch: any(made.request_id in guilty for made in batch.requests)


class TestRetries:
    def test_the_rows_of_a_failed_step_come_again_by_halves_as_they_were(self) -> None:
        driver = Driver(config(capacity_tokens=2001), overlap=False)
        driver.add(request("a", 9, 20), request("b", 8, 20), request("c", 7, 20))
        driver.step()
        driver.add(request("d", 5, 20), request("long", 100, 20))
        failing = present(driver.plan().batch)
        assert names(failing) == ["d", "long", "a", "b", "c"]
        before = dict(zip(names(failing), rows_of(failing), strict=True))
        assert driver.fail() == []
        halves = []
        for _ in range(2):
            batch = present(driver.plan().batch)
            assert batch.retry
            assert driver.plan().reason == "wait_commit", "one at a time"
            halves.append(names(batch))
            for name, row in zip(names(batch), rows_of(batch), strict=True):
                assert row == before[name]
            driver.commit()
        assert halves == [["d", "long", "a"], ["b", "c"]]
        following = present(driver.plan().batch)
        assert not following.retry
        assert names(following) == ["long", "a", "b", "c", "d"]
        driver.run()
        assert_answers(driver, dict.fromkeys(["a", "b", "c", "d", "long"], 20))
        driver.assert_all_free()

    @pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "synchronous"])
    @pytest.mark.parametrize("mixing", [True, False], ids=["mixed", "strict"])
    @pytest.mark.parametrize("prompt", [6, 150], ids=["short", "in chunks"])
    def test_only_who_is_guilty_ends(self, overlap: bool, mixing: bool, prompt: int) -> None:
        driver = Driver(
            config(capacity_tokens=2001, disable_mixed_chunk=not mixing),
            overlap=overlap,
            guilty=holds("bad"),
        )
        driver.add(request("r0", 5, 30), request("r1", 5, 30))
        for _ in range(4):
            driver.step()
        driver.add(request("r2", 90, 30), request("bad", prompt, 30), request("r3", 40, 30))
        driver.run()
        assert driver.reason("bad") == "error"
        assert present(driver.ended["bad"].finish).message == "the step failed"
        assert driver.tokens["bad"] == []
        assert_answers(driver, dict.fromkeys(["r0", "r1", "r2", "r3"], 30))
        assert driver.scheduler.counters.retractions == 0
        driver.assert_all_free()

    def test_one_guilty_of_64_rows_costs_a_few_steps(self) -> None:
        driver = Driver(
            config(capacity_tokens=8001, max_running_requests=64, chunked_prefill_size=4096),
            guilty=lambda batch: any(
                batch.requests[b].request_id == "r40" and count == 3
                for b, count in zip(batch.sampled, batch.output_counts, strict=True)
            ),
        )
        driver.add(*[request(f"r{i}", 4, 8) for i in range(64)])
        driver.run()
        assert driver.reason("r40") == "error"
        assert_answers(driver, {f"r{i}": 8 for i in range(64) if i != 40})
        assert sum(batch.retry for batch in driver.batches) == 2 * 6

    def test_a_step_that_fails_by_chance_costs_nobody_anything(self) -> None:
        driver = Driver(config(capacity_tokens=2001))
        driver.add(*[request(f"r{i}", 20 + i, 12) for i in range(5)])
        for _ in range(3):
            driver.step()
        for _ in range(2):
            driver.plan()
            driver.fail()
        driver.run()
        assert_answers(driver, {f"r{i}": 12 for i in range(5)})

    def test_rows_that_the_device_may_have_changed_are_named_once(self) -> None:
        driver = Driver(config(capacity_tokens=2001, disable_mixed_chunk=True))
        driver.add(request("a", 9, 20), request("b", 9, 20))
        driver.step()
        driver.step()
        driver.add(request("c", 9, 20), request("d", 9, 20))
        driver.plan()
        driver.commit()
        prefill, decode = driver.in_flight[0][0], driver.plan().batch
        assert (names(prefill), names(decode)) == (["c", "d"], ["a", "b", "c", "d"])
        driver.fail()
        named = []
        for _ in range(4):
            batch = present(driver.plan().batch)
            named.append(([made.request_id for made in batch.restore], batch.retry))
            driver.commit()
        assert named == [(["c"], True), (["d"], True), (["a", "b"], False), ([], False)]
        driver.run()
        assert_answers(driver, dict.fromkeys("abcd", 20))


class TestTakingBack:
    def test_who_was_admitted_by_a_later_step_waits_again_where_it_waited(self) -> None:
        driver = Driver(config(capacity_tokens=2001, max_running_requests=3))
        driver.add(request("a", 9, 20), request("b", 9, 20))
        driver.plan()
        driver.commit()
        driver.plan()
        driver.add(request("first", 9, 3), request("second", 9, 3))
        assert names(driver.plan().batch) == ["first", "a", "b"]
        counted = driver.scheduler.statistics().counters
        first = driver.scheduler._life.live["first"]
        driver.fail()
        assert first.state is RequestState.WAITING
        assert (first.row, first.length, first.launched_tokens, first.retractions) == (-1, 0, 0, 0)
        counters = driver.scheduler.statistics().counters
        assert counters.admitted == counted.admitted - 1
        assert counters.prompt_tokens == counted.prompt_tokens - 9
        assert counters.retractions == 0
        driver.run()
        started = [name for batch in driver.batches for name in names(batch)[: batch.num_prefill]]
        assert started[-2:] == ["first", "second"]
        assert_answers(driver, {"a": 20, "b": 20, "first": 3, "second": 3})
        assert driver.scheduler.counters.prompt_tokens == 4 * 9, "each is counted once"

    def test_a_waiting_time_out_goes_on_from_the_arrival(self) -> None:
        driver = Driver(config(max_running_requests=2, waiting_timeout_s=1.0))
        driver.add(request("a", 9, 60))
        driver.plan()
        driver.now = 0.5
        driver.add(request("late", 9, 3))
        driver.now = 0.9
        driver.plan()
        driver.guilty = lambda batch: True
        driver.fail()
        assert driver.reason("a") == "error"
        driver.now = 1.6
        assert [news.request.request_id for news in driver.plan().ended] == ["late"]
        assert "Timed out (waiting) after 1.1" in present(
            present(driver.ended["late"].finish).message
        )

    @pytest.mark.parametrize("kind", ["abort", "text"])
    def test_ends_that_come_between_apply(self, kind: str) -> None:
        driver = Driver(config(capacity_tokens=2001))
        driver.add(*[request(f"r{i}", 20, 12) for i in range(4)])
        for _ in range(4):
            driver.step()
        driver.plan()
        if kind == "abort":
            assert driver.scheduler.abort("r1")
        else:
            assert driver.scheduler.finish("r1", Finish(FinishReason.STOP, "text"))
        driver.fail()
        assert driver.scheduler.abort("r2")
        ended = [news.request.request_id for news in driver.plan().ended]
        assert ended == (["r1", "r2"] if kind == "abort" else ["r2"])
        assert names(driver.in_flight[0][0]) == ["r0"]
        driver.commit()
        assert names(driver.plan().batch) == ["r3"]
        driver.run()
        assert_answers(driver, {"r0": 12, "r3": 12})
        driver.assert_all_free()
        if kind == "text":
            r1, cached = driver.batches[0].requests[1], Place()
            key = r1.tokens_to_prefill().tobytes()
            driver.scheduler._memory.cache.tree.seek(cached, "", key, 100)
            assert cached.tokens == 20 + len(r1.output_ids) - 1, "what is true of it"

    def test_a_caller_whose_device_is_gone_ends_everything_at_once(self) -> None:
        driver = Driver(config(capacity_tokens=2001, max_running_requests=3))
        driver.add(*[request(f"r{i}", 20, 12) for i in range(6)])
        driver.step()
        driver.plan()
        driver.fail()
        assert driver.scheduler.abort_all("the device is gone") == 6
        plan = driver.plan()
        assert plan.batch is None
        assert len(plan.ended) == 6
        assert not driver.scheduler.has_unfinished
        driver.assert_all_free()


class TestWhatStaysCached:
    def test_nothing_that_a_failed_step_was_to_write(self) -> None:
        """N computes the middle of a page, N + 1, in flight, the rest of it and of the prompt."""
        driver = Driver(config(page_size=16, capacity_tokens=4096, chunked_prefill_size=64))
        driver.add(request("row", 1, 200))
        driver.step()
        driver.add(request("long", list(range(304)), 1))
        while not (driver.in_flight and driver.in_flight[-1][0].num_prefill):
            driver.step()
        ends: list[int] = []
        while not ends or ends[-1] < 304:
            batch = present(driver.plan().batch)
            ends.append(batch.prefix_lens[0] + batch.extend_lens[0])
            if ends[-1] < 304:
                driver.commit()
        assert ends[-2] % 16, "the middle chunk ends inside a page"
        driver.scheduler.abort("long")
        driver.fail()
        driver.add(request("twin", list(range(305)), 1))
        driver.run()
        twin = driver.ended["twin"].request
        assert twin.cached_tokens <= ends[-3] // 16 * 16
        assert driver.tokens["twin"] == [scripted_token("twin", 0)]

    def test_nor_by_its_twin_in_the_same_step(self) -> None:
        """x and y compute the same prompt side by side; y's pages are duplicates of x's, and are
        its own again once x's are gone."""
        prefix = list(range(100, 124))
        driver = Driver(
            config(page_size=8, capacity_tokens=800, chunked_prefill_size=128), guilty=holds("x")
        )
        driver.add(request("x", [*prefix, 1], 20), request("y", [*prefix, 2], 20))
        batch = present(driver.plan().batch)
        assert batch.requests[0].pages[:3] == batch.requests[1].pages[:3]
        driver.run()
        assert driver.reason("x") == "error"
        assert_answers(driver, {"y": 20})
        driver.assert_all_free()

    @pytest.mark.parametrize("tables", [True, False], ids=["table written", "table not written"])
    def test_table_entries_that_rode_in_a_failed_step_are_sent_again(self, tables: bool) -> None:
        """Strict mode: the entries of a row that is not in the step itself, since the prompt that
        it recomputes (log-probabilities are asked for) was cached, and its pages duplicates."""
        driver = Driver(
            config(capacity_tokens=4096, disable_mixed_chunk=True, chunked_prefill_size=128),
            overlap=False,
        )
        prompt = list(range(100, 164))
        driver.add(request("a", prompt, 1))
        driver.step()
        driver.add(request("b", prompt, 50, prompt_logprobs=0))
        driver.step()
        b = driver.scheduler._life.live["b"]
        driver.add(request("c", 40, 4))
        batch = present(driver.plan().batch)
        assert names(batch) == ["c"]
        assert set(batch.table_rows) == {b.row, batch.rows[0]}
        driver.fail(tables=tables)
        assert driver.reason("c") == "error"
        assert set(present(driver.plan().batch).table_rows) == {b.row}
        driver.run()
        assert_answers(driver, {"b": 50})

    def test_table_entries_of_a_launch_that_raised_are_sent_again(self) -> None:
        driver = Driver(config(page_size=4, capacity_tokens=4000))
        driver.add(request("a", 7, 30), request("b", 7, 30))
        driver.step()
        driver.step()
        assert present(driver.plan(launches=False).batch).table_pages, "position 8 opens a page"
        driver.commit()
        driver.fail()
        driver.run()
        assert_answers(driver, {"a": 30, "b": 30})
