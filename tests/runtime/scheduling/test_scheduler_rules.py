"""The rules of the pass, one by one, on a stepped scheduler."""

from __future__ import annotations

import random

import pytest

from runtime.config import SchedulerConfig
from runtime.errors import ConfigError, ContextTooLong, InvalidRequest, QueueFull
from runtime.request import Finish, FinishReason, RequestState
from runtime.runner import StepOutput
from runtime.scheduling.policies import POLICIES
from runtime.scheduling.retraction import NewTokenRatio, choose_victims
from runtime.scheduling.scheduler import Scheduler
from tests.runtime.scheduling.scheduler_harness import (
    EOS,
    Driver,
    config,
    request,
    scripted_token,
)
from tests.values import present


def kinds(driver: Driver) -> list[str]:
    return [batch.kind for batch in driver.batches]


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


class TestSteps:
    def test_running_rows_ride_along_with_every_chunk(self) -> None:
        driver = Driver(config(capacity_tokens=2001))
        driver.add(request("a", 5, 40), request("b", 5, 40))
        driver.step()
        driver.add(request("long", 400, 2))
        driver.step()
        while driver.scheduler.statistics().prefilling:
            driver.step()
        mixed = [batch for batch in driver.batches if batch.kind == "mixed"]
        assert len(mixed) == 7, "62 prefill tokens beside two decode rows"
        assert all(batch.num_decode == 2 for batch in mixed)
        assert [batch.extend_lens[0] for batch in mixed] == [62] * 6 + [28]

    def test_without_mixing_prefill_goes_first_and_alone(self) -> None:
        driver = Driver(config(capacity_tokens=2001, disable_mixed_chunk=True))
        driver.add(request("a", 5, 40))
        driver.step()
        driver.add(request("long", 200, 2))
        driver.step()
        driver.step()
        driver.step()
        driver.step()
        driver.step()
        assert kinds(driver) == ["prefill"] * 5 + ["decode"]

    def test_a_row_whose_last_token_is_launched_is_not_launched_again(self) -> None:
        driver = Driver()
        driver.add(request("r", 5, 3))
        driver.run()
        assert kinds(driver) == ["prefill", "decode", "decode"]
        assert len(driver.tokens["r"]) == 3

    def test_a_token_after_eos_is_dropped_and_its_slot_freed_once(self) -> None:
        driver = Driver(
            config(eos_token_ids=frozenset([EOS])),
            script=lambda _, index: EOS if index == 2 else 50 + index,
        )
        driver.add(request("r", 5, 10))
        driver.run()
        assert driver.tokens["r"] == [50, 51, EOS]
        assert len(driver.batches) == 4, "one more step was in flight"
        assert driver.ended["r"].finish == Finish(FinishReason.STOP, matched=EOS)
        driver.assert_all_free()

    def test_stop_token_ids_end_also_what_ignores_eos(self) -> None:
        script = {0: EOS, 1: EOS, 2: 77}
        driver = Driver(
            config(eos_token_ids=frozenset([EOS])), script=lambda _, index: script.get(index, 5)
        )
        stops = frozenset([77])
        driver.add(request("r", 5, 10, ignore_eos=True, stop_token_ids=stops))
        driver.run()
        assert driver.tokens["r"] == [EOS, EOS, 77]
        assert present(driver.ended["r"].finish).matched == 77

    def test_overlap_changes_no_token(self) -> None:
        answers = []
        for overlap in (True, False):
            driver = Driver(config(schedule_conservativeness=0.0), overlap=overlap)
            driver.add(*[request(f"r{i}", 20 + 7 * i, 20 + i) for i in range(6)])
            driver.run()
            answers.append(driver.tokens)
        assert answers[0] == answers[1]

    def test_nothing_to_do_is_idle_and_resets_the_ratio(self) -> None:
        driver = Driver()
        driver.add(request("r", 5, 30))
        driver.run()
        assert driver.scheduler.statistics().new_token_ratio < 0.7
        assert driver.plan().reason == "idle"
        assert driver.scheduler.statistics().new_token_ratio == 0.7

    def test_at_most_two_steps_are_in_flight(self) -> None:
        driver = Driver()
        driver.add(request("r", 5, 30))
        driver.plan()
        driver.plan()
        assert driver.plan().reason == "wait_commit"
        driver.commit()
        assert driver.plan().batch is not None


class TestChunkedRequest:
    def test_its_row_and_kv_stay_between_chunks_and_it_streams_nothing(self) -> None:
        driver = Driver()
        made = request("r", 150, 3)
        driver.add(made)
        driver.step()
        row = made.row
        assert made.state is RequestState.PREFILLING
        assert made.length == 64
        driver.step()
        assert made.row == row
        assert driver.tokens["r"] == []
        assert driver.scheduler.statistics().prefilling == 1
        driver.run()
        assert [list(batch.sampled) for batch in driver.batches[:3]] == [[], [], [0]]

    def test_its_finished_pages_are_shared_and_its_tail_is_not(self) -> None:
        # 37 tokens a step beside the decode row: chunks end inside pages of 16.
        driver = Driver(config(page_size=16, capacity_tokens=160 * 16, chunked_prefill_size=38))
        driver.add(request("run", 5, 50))
        driver.step()
        made = request("long", 150, 2)
        driver.add(made)
        driver.step()
        assert made.length == 32, "a new prompt starts with whole pages"
        driver.step()
        assert made.length == 69
        driver.plan()
        assert made.scheduling.tree_tokens == 64
        driver.run()

    @pytest.mark.parametrize("turns", [1, 2, 3], ids=["first", "second", "last"])
    @pytest.mark.parametrize("in_flight", [True, False], ids=["in flight", "committed"])
    def test_abort_after_a_chunk_returns_everything(self, turns: int, in_flight: bool) -> None:
        driver = Driver()
        driver.add(request("r", 150, 10))
        for _ in range(turns):
            while driver.in_flight:
                driver.commit()
            driver.plan()
        if not in_flight:
            driver.commit()
        before = len(driver.tokens["r"])
        assert driver.scheduler.abort("r")
        assert not driver.scheduler.abort("r"), "recorded once"
        driver.run()
        assert driver.reason("r") == "abort"
        assert len(driver.tokens["r"]) == before
        driver.assert_all_free()

    def test_an_aborted_chunk_is_not_put_into_the_cache(self) -> None:
        driver = Driver()
        driver.add(request("r", 150, 10))
        driver.plan()
        driver.scheduler.abort("r")
        driver.run()
        assert driver.scheduler.statistics().cached_tokens == 0

    def test_only_one_prompt_is_cut_at_a_time(self) -> None:
        driver = Driver(config(capacity_tokens=2001))
        driver.add(request("a", 100, 2), request("b", 100, 2))
        driver.run()
        assert [list(b.extend_lens[: b.num_prefill]) for b in driver.batches[:4]] == [
            [64], [36, 28], [71 - 8], [9],
        ]  # fmt: skip

    def test_whole_prompts_with_chunking_off(self) -> None:
        driver = Driver(config(capacity_tokens=2001, chunked_prefill_size=-1))
        driver.add(request("a", 1000, 2))
        driver.run()
        assert driver.batches[0].prefill_tokens == 1000


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


class TestGrammar:
    def test_a_request_waits_outside_the_queue_until_its_grammar_is_compiled(self) -> None:
        class Compiling:
            ready = False

        grammar = Compiling()
        driver = Driver()
        driver.add(request("g", 5, 2, grammar=grammar))
        assert driver.plan().reason == "grammar"
        driver.now = 1.5
        driver.add(request("other", 5, 2))
        driver.step()
        assert [r.request_id for r in driver.batches[0].requests] == ["other"]
        debug = {item.request_id: item for item in driver.scheduler.requests}
        assert debug["g"].blocked_by == "grammar"
        grammar.ready = True
        driver.now = 2.0
        assert driver.plan().grammars_ready == ["g"]
        driver.run()
        waited = driver.scheduler.waited_seconds(driver.ended["g"].request)
        assert waited["grammar"] == pytest.approx(2.0)


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"truncation_align_size": 128}, "truncation_align_size 128.*64"),
            ({"clip_max_new_tokens": 0}, "clip_max_new_tokens 0: must be at least 1"),
            ({"tpot_slo_ms": -1.0}, "tpot_slo_ms -1.0: must be at least 0"),
            ({"waiting_timeout_s": float("nan")}, "waiting_timeout_s nan"),
        ],
        ids=["alignment beyond the chunk", "clip", "negative target", "not a number"],
    )
    def test_options_that_cannot_be_served_are_refused(self, options: dict, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            config(**options)

    def test_options_change_while_requests_run(self) -> None:
        driver = Driver(config(capacity_tokens=2001))
        driver.add(request("a", 5, 60))
        driver.step()
        driver.scheduler.change_options(chunked_prefill_size=32, schedule_policy="lof")
        driver.add(request("b", 100, 2))
        driver.step()
        assert driver.batches[-1].prefill_tokens == 31
        driver.run()

    @pytest.mark.parametrize(
        "changes",
        [{"page_size": 4}, {"capacity_tokens": 4000}, {"schedule_policy": "magic"}],
        ids=["page size", "capacity", "unknown policy"],
    )
    def test_what_cannot_be_changed_is_refused(self, changes: dict) -> None:
        scheduler = Scheduler(config())
        before: SchedulerConfig = scheduler.config
        with pytest.raises(ConfigError):
            scheduler.change_options(**changes)
        assert scheduler.config is before


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


class TestDeadlineBook:
    def test_answers_long_given_are_not_kept_until_their_deadline(self) -> None:
        driver = Driver(checked=False)
        for i in range(2500):
            driver.add(request(f"r{i}", 3, 1, deadline_s=1e9))
            if i % 8 == 7:
                driver.run()
        assert len(driver.scheduler._life._deadlines._heap) <= 1100


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
