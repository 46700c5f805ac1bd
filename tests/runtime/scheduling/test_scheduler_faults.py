"""Faults that other servers had, each as the kind of fault that it is.

The identifiers are those of the public reports: the repository and number of the issue or change.
"""

from __future__ import annotations

from contextlib import suppress

import pytest

from runtime.errors import ContextTooLong
from runtime.request import Finish, FinishReason, TokenLogprobs
from runtime.runner import StepOutput
from runtime.scheduling.policies import POLICIES
from tests.runtime.scheduling.fake_device import scripted_token
from tests.runtime.scheduling.scheduler_harness import EOS, Driver, config, request
from tests.values import present


def script_of(made: dict[str, list[int]]):
    """A script that gives these tokens, then the usual ones."""

    def script(request_id: str, index: int) -> int:
        tokens = made.get(request_id, [])
        return tokens[index] if index < len(tokens) else scripted_token(request_id, index)

    return script


@pytest.mark.parametrize("page_size", [1, 16])
def test_every_length_near_capacity_is_refused_or_served(page_size: int) -> None:
    """sglang 39271: intake let through what admission could never take."""
    pool = 20 * page_size
    refused = served = 0
    for tokens in range(max(pool - 40, 1), pool + 3):
        driver = Driver(
            config(page_size=page_size, capacity_tokens=pool + page_size, context_length=10_000)
        )
        with suppress(ContextTooLong):
            driver.add(request("near", tokens, 1))
        if not driver.scheduler.has_unfinished:
            refused += 1
        else:
            for _ in range(50):
                driver.step()
            assert len(driver.tokens["near"]) == 1
            served += 1
        driver.add(request("small", 4, 1))
        driver.run()
        assert len(driver.tokens["small"]) == 1
        driver.assert_all_free()
    assert refused
    assert served


def test_a_cancelled_giant_leaves_the_queue_open() -> None:
    """sglang 39271, second half: state left behind by a request cancelled near capacity."""
    driver = Driver(config(chunked_prefill_size=16))
    driver.add(request("giant", 190, 4))
    for _ in range(5):
        driver.step()
    driver.scheduler.abort("giant")
    driver.add(request("small", 4, 1))
    driver.run()
    assert driver.reason("giant") == "abort"
    assert len(driver.tokens["small"]) == 1


def test_a_free_slot_is_never_left_unused_while_somebody_waits() -> None:
    """sglang 35537: "full" stayed set from a last chunk's pass."""
    driver = Driver(config(max_running_requests=4, capacity_tokens=4001))
    driver.add(*[request(f"r{i}", 200, 64) for i in range(4)])
    idle_passes = 0
    while driver.scheduler.has_unfinished:
        before = driver.scheduler.counters.chunks
        driver.step()
        stats = driver.scheduler.statistics()
        tried = driver.scheduler.counters.chunks > before
        waits = stats.waiting and stats.running + stats.prefilling < 4
        idle_passes = idle_passes + 1 if waits and not tried else 0
        assert idle_passes < 2
        if driver.ended:
            assert all(driver.tokens[f"r{i}"] for i in range(4))


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
def test_a_preempted_request_with_outputs_is_prefilled_again_within_its_tokens(cache: bool) -> None:
    """nano-vllm 211, 233, 144: start moved by a cache hit ran past the end; "no output yet" told
    prefill from decode. The fake device checks every start and length."""
    options = {"capacity_tokens": 140, "disable_radix_cache": not cache, "page_size": 4}
    driver = Driver(config(schedule_conservativeness=0.0, **options))
    driver.add(request("old", 40, 60), request("young", 30, 50))
    driver.run()
    assert driver.scheduler.counters.retractions
    young = driver.ended["young"].request
    assert young.retractions
    for name, count in (("old", 60), ("young", 50)):
        assert driver.tokens[name] == [scripted_token(name, i) for i in range(count)]
    resumed = [
        batch.prefix_lens[b] + batch.extend_lens[b]
        for batch in driver.batches
        for b in range(batch.num_prefill)
        if batch.requests[b] is young
    ]
    assert max(resumed) > 30, "outputs are part of what is prefilled again"
    driver.assert_all_free()


def test_log_probabilities_stay_parallel_to_tokens_over_retractions() -> None:
    """sglang 20724: accumulators of two trajectories in one answer."""
    driver = Driver(config(schedule_conservativeness=0.0, capacity_tokens=101))
    inner = driver.device.run

    def run(batch):
        output = inner(batch)
        output.logprobs = [TokenLogprobs(token, -1.0) for token in output.token_ids]
        for b in range(batch.num_prefill):
            made, start = batch.requests[b], batch.prefix_lens[b]
            last = start + batch.extend_lens[b] >= len(made.input_ids)
            upto = batch.extend_lens[b] - last
            ids = made.input_ids[start + 1 : start + 1 + upto]
            output.prompt_logprobs[b] = [TokenLogprobs(token, -2.0) for token in ids]
        return output

    driver.device.run = run
    seen: dict[str, list[int]] = {}
    prompts: dict[str, list] = {}
    inner_collect = driver.collect

    def collect(outputs):
        for news in outputs:
            name = news.request.request_id
            if news.logprobs is not None:
                seen.setdefault(name, []).extend(entry.token_id for entry in news.logprobs)
            if news.prompt_logprobs is not None:
                assert name not in prompts, "prompt log-probabilities come once"
                prompts[name] = news.prompt_logprobs
        inner_collect(outputs)

    driver.collect = collect
    made = [request(f"r{i}", 20 + i, 40, logprobs=0, prompt_logprobs=0) for i in range(3)]
    driver.add(*made)
    driver.run()
    assert driver.scheduler.counters.retractions
    for item in made:
        assert seen[item.request_id] == list(item.output_ids) == driver.tokens[item.request_id]
        given = prompts[item.request_id]
        assert given[0] is None
        assert [entry.token_id for entry in given[1:]] == list(item.input_ids[1:])


@pytest.mark.parametrize("policy", [one.name for one in POLICIES.values() if one.keys])
@pytest.mark.parametrize("priority", [0, 5], ids=["no priorities", "among equals of priority 5"])
def test_a_cold_prompt_is_admitted_within_a_bounded_number_of_passes(
    policy: str, priority: int
) -> None:
    """sglang 31954, 33210: cache-hot arrivals overtook a cold prompt without bound. Here 64 passes
    of 10 ms after it was first passed over, with the bound at 500 ms."""
    driver = Driver(
        config(
            schedule_policy=policy,
            max_queue_skip_ms=500.0,
            max_running_requests=1,
            capacity_tokens=4001,
        )
    )
    warm = list(range(5000, 5064))
    driver.add(request("warm", warm, 1))
    driver.run()
    # Long and with little output, so that every policy but fcfs prefers the others.
    driver.add(request("cold", list(range(9000, 9200)), 1, priority=priority))
    passes = 0
    for turn in range(400):
        if driver.tokens["cold"]:
            break
        passes = turn
        driver.add(
            *[request(f"hot{turn}-{i}", [*warm, turn, i], 3, priority=priority) for i in range(3)]
        )
        driver.step()
    assert driver.tokens["cold"], f"{policy}: still waiting after {passes} passes"
    assert passes <= 64 + 10


def test_without_the_prefix_cache_chunks_go_on_where_they_stopped() -> None:
    """sglang 36855: with no tree, chunk 0 was prefilled for ever and took new slots each time."""
    tokens = {}
    for cache in (True, False):
        driver = Driver(config(capacity_tokens=401, disable_radix_cache=not cache))
        made = request("long", 300, 6)
        driver.add(made)
        held = []
        while driver.scheduler.has_unfinished:
            driver.step()
            held.append((len(made.pages), made.length))
        assert all(pages <= length for pages, length in held)
        chunks = [batch.extend_lens[0] for batch in driver.batches if batch.num_prefill]
        assert chunks == [64, 64, 64, 64, 44]
        tokens[cache] = driver.tokens["long"]
        driver.assert_all_free()
    assert tokens[True] == tokens[False]


def test_requests_that_end_in_their_mixed_prefill_step_give_their_row_back() -> None:
    """sglang 10871, 10833: the table row of a request that ended in a mixed step leaked."""
    driver = Driver(config(max_running_requests=8, capacity_tokens=2001))
    driver.add(*[request(f"long{i}", 10, 150) for i in range(4)])
    for _ in range(3):
        driver.step()
    driver.add(*[request(f"one{i}", 5, 1) for i in range(100)])
    driver.run()
    assert any(b.kind == "mixed" and b.num_prefill > 1 for b in driver.batches)
    assert sum(driver.reason(f"one{i}") == "length" for i in range(100)) == 100
    driver.assert_all_free()


def test_after_a_duplicate_insertion_the_table_points_at_the_trees_pages() -> None:
    """mini-sglang 142: freed duplicates stayed in the page table of a running request.

    X and Y compute the same prefix in one step (it is too short to be waited for); Z then takes
    and overwrites what Y gave back. The fake device sees any wrong page that Y reads."""
    driver = Driver(config(page_size=8, capacity_tokens=200, chunked_prefill_size=128))
    prefix = list(range(100, 124))
    driver.add(request("x", [*prefix, 1], 20), request("y", [*prefix, 2], 20))
    driver.step()
    x, y = (item for item in driver.batches[0].requests)
    assert driver.batches[0].num_prefill == 2, "both in one step"
    assert x.pages[:3] == y.pages[:3]
    assert x.pages[3] != y.pages[3]
    driver.add(request("z", 60, 20))
    driver.run()
    assert driver.tokens["y"] == [scripted_token("y", i) for i in range(20)]
    driver.assert_all_free()


def test_an_abort_while_the_last_chunk_is_in_flight_streams_nothing() -> None:
    """sglang 37295: its sampled token was still streamed; dropping it early leaked a slot."""
    driver = Driver()
    driver.add(request("r", 100, 10))
    driver.plan()
    driver.plan()
    assert driver.batches[1].sampled, "the last chunk is launched"
    assert driver.scheduler.abort("r")
    assert driver.commit() == []
    assert driver.commit() == []
    plan = driver.plan()
    assert [present(news.finish).reason for news in plan.ended] == [FinishReason.ABORT]
    assert plan.batch is None
    assert driver.tokens["r"] == []
    assert driver.scheduler.statistics().free_tokens == 200 - 100, "the prompt stays cached"
    driver.assert_all_free()


def test_retraction_counts_what_the_step_in_flight_takes() -> None:
    """sglang 14972: retraction with the numbers of the step before; the allocation after it failed.

    The pool holds six decoding requests to within two pages."""
    driver = Driver(
        config(page_size=4, capacity_tokens=6 * 28 + 8 + 4, schedule_conservativeness=0.0)
    )
    driver.add(*[request(f"r{i}", 24, 40) for i in range(6)])
    while driver.scheduler.has_unfinished:
        driver.step()
        assert driver.scheduler.statistics().free_tokens >= 0
    assert driver.scheduler.counters.retractions
    for i in range(6):
        assert driver.tokens[f"r{i}"] == [scripted_token(f"r{i}", k) for k in range(40)]
    driver.assert_all_free()


def test_a_row_is_not_given_away_while_a_launched_step_names_it() -> None:
    """sglang 18803, 18746: the next owner of a table row overwrote it under a running step."""
    script = script_of({"a": [5, 6, EOS]})
    driver = Driver(config(max_running_requests=1, eos_token_ids=frozenset([EOS])), script=script)
    driver.add(request("a", 10, 20))
    while driver.reason_or_none("a") is None:
        driver.step()
    # A ended by EOS in step N - 1 while step N with A is in flight.
    in_flight = driver.in_flight[0][0]
    assert in_flight.requests[0].request_id == "a"
    row = in_flight.rows[0]
    driver.add(request("b", 10, 2))
    plan = driver.plan()
    assert plan.batch is None
    assert plan.reason == "wait_commit"
    driver.commit()
    batch = driver.plan().batch
    assert batch is not None
    assert batch.requests[0].request_id == "b"
    assert batch.rows[0] == row
    driver.run()
    assert driver.tokens["a"] == [5, 6, EOS]
    driver.assert_all_free()


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "synchronous"])
def test_rules_see_how_many_tokens_stand_before_the_sampled_one(overlap: bool) -> None:
    """sglang 20026, 8056; vllm 46243: a rule that looks at the output ran before the last token was
    added. What rules need, positions and output counts, is the step's own."""
    driver = Driver(overlap=overlap)
    driver.add(request("r", 10, 5), request("s", 12, 5))
    driver.run()
    for name, inputs in (("r", 10), ("s", 12)):
        counts = [
            (batch.sample_positions[i] - inputs, batch.output_counts[i])
            for batch in driver.batches
            for i, b in enumerate(batch.sampled)
            if batch.requests[b].request_id == name
        ]
        assert counts == [(k, k) for k in range(5)]


@pytest.mark.parametrize(("min_tokens", "length"), [(0, 1), (1, 2), (4, 5)])
def test_an_end_counts_only_after_min_tokens(min_tokens: int, length: int) -> None:
    """vllm 46243, 32163: exactly min_tokens tokens before the end becomes possible."""
    driver = Driver(config(eos_token_ids=frozenset([EOS])), script=lambda _, __: EOS)
    driver.add(request("r", 5, 20, min_tokens=min_tokens))
    driver.run()
    assert len(driver.tokens["r"]) == length
    assert driver.reason("r") == "stop"


def test_an_abort_of_an_ended_or_unknown_request_is_nothing() -> None:
    """sglang 21173, vllm 29987: looking up state that was gone killed the loop."""
    driver = Driver()
    assert not driver.scheduler.abort("nobody")
    driver.add(request("r", 5, 2))
    driver.run()
    assert not driver.scheduler.abort("r")
    assert not driver.scheduler.finish("nobody", Finish(FinishReason.STOP))
    assert driver.reason("r") == "length"
    assert driver.scheduler.abort_all() == 0


def test_a_failed_recount_when_idle_is_reported_and_serving_goes_on() -> None:
    """sglang 35270: an idle self-check stopped a healthy server."""
    driver = Driver(checked=False)
    driver.add(request("r", 5, 2))
    driver.run()
    driver.scheduler._memory.cache.evictable_tokens += 1
    driver.add(request("s", 5, 2))
    driver.run()
    while driver.scheduler.check_some():
        pass
    error = driver.scheduler.statistics().invariant_error
    assert error is not None
    assert "evictable" in error
    driver.add(request("t", 5, 2))
    driver.run()
    assert len(driver.tokens["t"]) == 2


def test_a_row_without_a_token_ends_alone() -> None:
    """A NaN logit or an empty mask: that request ends with the reason, the others go on."""
    driver = Driver(overlap=False)
    driver.add(request("bad", 5, 5), request("good", 5, 5))
    driver.step()
    batch = driver.scheduler.plan(driver.now).batch
    assert batch is not None
    output = driver.device.run(batch)
    bad = [r.request_id for r in batch.requests].index("bad")
    failed = StepOutput(output.token_ids, failed={bad: "a logit is NaN"})
    driver.collect(driver.scheduler.commit(batch, failed, driver.now))
    driver.run()
    assert present(driver.ended["bad"].finish).message == "a logit is NaN"
    assert driver.reason("bad") == "error"
    assert len(driver.tokens["bad"]) == 1
    assert len(driver.tokens["good"]) == 5
    driver.assert_all_free()
