"""The rules of the pass, one by one, on a stepped scheduler."""

from __future__ import annotations

import pytest

from runtime.config import SchedulerConfig
from runtime.errors import ConfigError
from runtime.request import Finish, FinishReason, RequestState
from runtime.scheduling.scheduler import Scheduler
from tests.runtime.scheduling.scheduler_harness import EOS, Driver, config, request
from tests.values import present


def kinds(driver: Driver) -> list[str]:
    return [batch.kind for batch in driver.batches]


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
