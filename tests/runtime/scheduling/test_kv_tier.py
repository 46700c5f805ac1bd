"""The tier below the pool, as the scheduler sees it: what is copied when, what comes back, and what
becomes of copies and loads that fail."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from runtime.scheduling.kv_tier import TierPrefix
from runtime.simulation.recorder import RecordingScheduler
from runtime.simulation.replay import replay
from runtime.simulation.trace import TraceWriter, config_from, read_trace, to_line
from tests.runtime.scheduling.fake_device import FakeTier, chain_of
from tests.runtime.scheduling.naive_books import NaiveBooks
from tests.runtime.scheduling.scheduler_harness import Driver, config, request

CONVERSATION = list(range(1000, 1100))
OTHERS = list(range(2000, 2180))


def driver(**options) -> Driver:
    return Driver(config(**{"kv_tier_pages": 1000, **options}))


def serve(made: Driver, name: str, tokens: list[int], **options):
    """Serves a request to its end, with all that it leaves behind; returns it."""
    served = request(name, tokens, **options)
    made.add(served)
    made.run()
    made.step()
    made.step()
    return served


def evicted(**options) -> Driver:
    """A driver whose pool has lost most of the conversation, and whose tier has it."""
    made = driver(**options)
    serve(made, "first", CONVERSATION)
    serve(made, "others", OTHERS)
    return made


def in_tier(made: Driver) -> set[tuple[int, ...]]:
    """The prefixes of the tier, by all their tokens."""
    return {tokens for _, tokens in NaiveBooks(made.scheduler, made.device).tier_tree()}


def test_what_was_evicted_comes_back_by_a_load_and_is_not_computed_again() -> None:
    made = evicted()
    computed = made.scheduler.counters.computed_tokens
    again = serve(made, "again", [*CONVERSATION, 7, 8])
    assert made.tokens["again"] == [made.device.script("again", index) for index in range(4)]
    assert again.cached_tokens == 100
    assert made.scheduler.counters.loaded_tokens > 40
    # Two tokens of the prompt, and the outputs but the last.
    assert made.scheduler.counters.computed_tokens - computed == 2 + 3
    made.assert_all_free()


def test_a_request_says_that_it_waits_for_its_load_and_others_go_on() -> None:
    made = evicted()
    made.add(request("again", [*CONVERSATION, 7]), request("short", 5))
    plan = made.plan()
    assert plan.batch is not None
    assert [r.request_id for r in plan.batch.requests] == ["short"]
    assert len(plan.loads) == 1
    (waiting,) = [r for r in made.scheduler.requests if r.request_id == "again"]
    assert (waiting.state, waiting.blocked_by) == ("waiting", "kv_load")
    while made.in_flight:
        made.settle()
    for _ in range(5):
        made.plan()
        while made.in_flight:
            made.settle()
        made.now += 0.5
    plan = made.plan()
    assert (plan.batch, plan.reason) == (None, "kv_load")
    (waiting,) = made.scheduler.requests
    assert waiting.waited_s["kv_load"] >= 2.0
    made.run()
    assert made.reason("again") == "length"


@pytest.mark.parametrize("good", [0, 1, 30])
def test_a_failed_load_shortens_the_match(good: int) -> None:
    made = evicted()
    have = made.scheduler.statistics().cached_tokens
    made.add(again := request("again", [*CONVERSATION, 7]))
    (load,) = made.plan().loads
    found = 100 - len(load.pages)
    made.finish_load(load.load_id, good)
    left = max(len(tokens) for tokens in in_tier(made) if tokens[0] == CONVERSATION[0])
    assert left == found + good, "what could not be read is forgotten"
    made.run()
    assert again.cached_tokens == found + good
    assert have >= found
    assert made.scheduler.counters.failed_loads == 1
    # What could not be read is forgotten: it was computed, and written again.
    made.step()
    made.step()
    assert tuple(CONVERSATION) in {tokens[:100] for tokens in in_tier(made)}
    made.assert_all_free()


def test_no_second_load_is_tried_for_a_request_that_waits() -> None:
    made = evicted()
    made.add(request("again", [*CONVERSATION, 7]))
    (load,) = made.plan().loads
    made.finish_load(load.load_id, 20)
    while made.scheduler.has_unfinished:
        assert not made.step().loads


def test_fewer_tokens_than_were_measured_to_be_worth_it_are_computed() -> None:
    made = evicted(kv_load_tokens=101)
    serve(made, "again", [*CONVERSATION, 7])
    assert made.scheduler.counters.loaded_tokens == 0
    assert made.tokens["again"] == [made.device.script("again", index) for index in range(4)]


def test_two_requests_with_one_prefix_wait_for_one_load() -> None:
    made = evicted()
    made.add(request("a", [*CONVERSATION, 7]), request("b", [*CONVERSATION, 8]))
    (first,) = made.plan().loads
    assert made.plan().loads == []
    made.finish_load(first.load_id)
    made.run()
    assert made.scheduler.counters.loaded_tokens == len(first.pages)


@pytest.mark.parametrize(("outputs", "fits"), [(60, True), (120, False)])
def test_a_load_leaves_running_rows_what_they_are_to_need(outputs: int, fits: bool) -> None:
    """Of 200 tokens 20 and the outputs are taken by then, and the load needs some 100."""
    made = evicted(schedule_conservativeness=10.0)  # all outputs are reserved
    made.add(running := request("long", 20, outputs))
    made.plan()
    made.add(request("again", [*CONVERSATION, 7], 1))
    loads = made.step().loads
    assert bool(loads) == fits
    while not loads:
        loads = made.step().loads
    stats = made.scheduler.statistics()
    assert (running.remaining_tokens > 0) == fits
    assert stats.free_tokens + stats.evictable_tokens >= running.remaining_tokens
    made.run()
    assert made.scheduler.counters.retractions == 0


def test_a_pass_never_waits_for_a_copy_and_what_was_evicted_meanwhile_is_not_kept() -> None:
    made = driver()
    made.add(request("first", CONVERSATION))
    for _ in range(10):
        made.plan()
        while made.in_flight:
            made.settle()
    (copy_id,) = made.device.tier.copies
    assert made.reason("first") == "length"
    made.add(request("others", OTHERS))
    for _ in range(10):
        made.plan()
        while made.in_flight:
            made.settle()
    assert made.reason("others") == "length"
    cached = made.scheduler.statistics().cached_tokens - 183
    made.finish_copy(copy_id)
    # The pool kept the beginning of the conversation; of the rest the pages hold something else.
    assert max(map(len, in_tier(made)), default=0) == cached < 100
    NaiveBooks(made.scheduler, made.device).check_tier()


def test_nothing_is_copied_before_its_prompt_has_given_a_token() -> None:
    made = driver(chunked_prefill_size=16)
    made.add(request("long", CONVERSATION))
    for _ in range(6):  # chunks, of which all but the last are committed and cached
        assert made.plan().copies == []
        made.settle()
    assert made.scheduler.statistics().cached_tokens >= 80
    plan = made.plan()
    assert plan.copies == []
    made.commit()
    assert made.plan().copies != []


def test_a_prompt_without_a_number_leaves_nothing_in_the_tier() -> None:
    made = driver(chunked_prefill_size=16)
    made.add(request("long", CONVERSATION))
    while made.reason_or_none("long") is None:
        if not made.in_flight:
            made.plan()
        batch, _ = made.in_flight[0]
        made.commit(failed=[0] if batch.sampled else [])
    for _ in range(4):
        made.step()
    assert made.reason("long") == "error"
    assert in_tier(made) == set()


def test_pages_of_a_prompt_that_has_given_no_token_are_not_kept_for_another_either() -> None:
    """A prompt quotes an answer while it is made, and is computed faster: its pages take the place
    of the answer's own, which has not read them. Then it turns out to be NaN."""
    made = driver(chunked_prefill_size=16, capacity_tokens=1001, kv_load_tokens=1000)
    start = CONVERSATION[:40]
    made.add(answer := request("answer", start, 12))
    while not answer.output_ids:
        made.plan()
        made.commit()
    quoted = [made.device.script("answer", index) for index in range(12)]
    made.add(request("quote", [*start, *quoted, *range(5000, 5250)]))
    while made.reason_or_none("quote") is None:
        batch = made.plan().batch
        assert batch is not None
        # A middle chunk is not sampled: only its last gives a token, or none.
        last = [i for i, b in enumerate(batch.sampled) if batch.requests[b].request_id == "quote"]
        made.commit(failed=last)
        for copy_id in list(made.device.tier.copies):
            made.finish_copy(copy_id)
    assert (made.reason("answer"), made.reason("quote")) == ("length", "error")
    made.finish_tier()
    assert in_tier(made) == {tuple(start)}


def test_nothing_is_loaded_behind_what_a_step_in_flight_may_take_back() -> None:
    made = evicted()
    made.add(request("whole", CONVERSATION[:60], prompt_logprobs=0))  # matches nothing
    made.plan()
    made.add(request("again", [*CONVERSATION, 7]))
    assert not made.plan().loads
    made.fail()
    made.scheduler.check()
    made.run()
    assert made.tokens["again"] == [made.device.script("again", index) for index in range(4)]
    made.assert_all_free()


def test_a_failed_copy_is_given_up_and_ordered_again_with_the_next_use() -> None:
    made = driver()
    made.add(request("first", CONVERSATION))
    while made.scheduler.has_unfinished or made.device.tier.copies:
        made.plan()
        while made.in_flight:
            made.settle()
        for copy_id in list(made.device.tier.copies):
            made.finish_copy(copy_id, 10)
    assert made.scheduler.counters.failed_copies > 0
    serve(made, "again", [*CONVERSATION, 7])
    assert (*CONVERSATION, 7) in {tokens[:101] for tokens in in_tier(made)}


def test_the_tier_drops_its_oldest_when_it_is_full() -> None:
    made = driver(kv_tier_pages=150)
    serve(made, "first", CONVERSATION)
    serve(made, "others", list(range(2000, 2100)))
    assert made.scheduler.statistics().tier_tokens <= 150
    assert any(tokens[0] == 2000 and len(tokens) >= 100 for tokens in in_tier(made))


def test_an_abort_leaves_its_load_to_the_cache_and_a_flush_waits_for_it() -> None:
    made = evicted()
    made.add(request("again", [*CONVERSATION, 7]))
    (load,) = made.plan().loads
    made.scheduler.abort("again")
    assert made.plan().reason == "idle"
    assert not made.scheduler.flush()
    made.finish_load(load.load_id)
    assert made.scheduler.flush()
    stats = made.scheduler.statistics()
    assert (stats.cached_tokens, stats.tier_tokens) == (0, 0)
    made.assert_all_free()


def test_what_the_tier_held_before_is_served() -> None:
    made = driver(page_size=4, capacity_tokens=404)
    tokens = CONVERSATION[:40]
    frames = array("i", [5, 3, 9, 1, 2, 7, 8, 30, 31, 32])
    chain = chain_of("salt", tokens)
    for at, frame in enumerate(frames):
        made.device.tier.frames[frame] = chain[4 * at : 4 * at + 4]
    longer = TierPrefix("salt", array("i", tokens), frames)
    shorter = TierPrefix("salt", array("i", tokens[:8]), frames[:2])
    made.scheduler.adopt([shorter, longer])
    made.scheduler.check()
    again = serve(made, "again", [*tokens, 7], namespace="salt")
    other = serve(made, "other", [*tokens, 7])
    assert (again.cached_tokens, other.cached_tokens) == (40, 0)


def test_without_a_tier_nothing_is_named() -> None:
    made = driver(kv_tier_pages=0)
    made.add(request("first", CONVERSATION))
    while made.scheduler.has_unfinished:
        plan = made.step()
        assert not plan.copies
        assert not plan.loads
    assert made.device.tier == FakeTier()


def test_copies_loads_and_their_failures_are_replayed_to_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "tier.jsonl"
    made = driver(chunked_prefill_size=32)
    made.scheduler = RecordingScheduler(made.config, TraceWriter(path, made.config))
    made.scheduler.adopt([])
    for turn in range(12):
        for name, tokens in (("r", [*CONVERSATION, turn]), ("s", OTHERS)):
            made.add(request(f"{name}{turn}", tokens))
            while made.scheduler.has_unfinished or made.device.tier.copies:
                made.plan()
                while made.in_flight:
                    made.settle()
                for copy_id in list(made.device.tier.copies):
                    made.finish_copy(copy_id, None if turn % 3 else 5)
                for load_id in list(made.device.tier.loads):
                    made.finish_load(load_id, None if turn % 4 else 3)
    assert made.scheduler.counters.failed_loads > 0
    made.scheduler.close()
    trace = read_trace(path)
    kinds = {event["event"] for _, event in trace.events}
    assert {"adopt", "stored", "loaded"} <= kinds
    report = replay(trace, config_from(trace.options))
    assert report.difference is None
    assert report.events == len(trace.events)
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    assert lines == [to_line(event) for _, event in trace.events]
