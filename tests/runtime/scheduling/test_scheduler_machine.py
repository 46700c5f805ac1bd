"""Random lives of a scheduler: every rule checked after every step, every token on a fake device."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from runtime.config import SchedulerConfig
from runtime.errors import ContextTooLong, InvalidRequest, QueueFull
from runtime.request import Finish, FinishReason, PromptPin, Request, RequestOutput
from runtime.runner import StepOutput
from runtime.scheduling.policies import EVICTION_POLICIES, POLICIES
from runtime.scheduling.schedule_batch import ScheduleBatch
from tests.runtime.scheduling.naive_model import NaiveModel, expected_tokens
from tests.runtime.scheduling.scheduler_harness import EOS, Driver, request

STEPS = 20_000


class SwitchGrammar:
    """Compiled when the test says so.

    Args:
        fault: where it raises, if anywhere: when asked for the "mask" of a token, or "taking" it.
        index: of that output token.
    """

    def __init__(self, fault: str = "", index: int = 0) -> None:
        self.ready = False
        self.fault = fault
        self.index = index


GRAMMAR_FAULT = Finish(FinishReason.ERROR, message="the output cannot be processed")


def script(request_id: str, index: int) -> int:
    """A token per request and position; about one in 60 is EOS."""
    value = zlib.crc32(f"{request_id}/{index}".encode())
    return EOS if value % 60 == 0 else 100 + value % 50


def random_pins(rng: random.Random, tokens: int) -> tuple[PromptPin, ...]:
    """What a client wants to be kept of a prompt."""
    return tuple(
        PromptPin(
            rng.choice([tokens, rng.randint(1, max(tokens, 1))]),
            rng.choice([0.03, 0.3, 9.0]),
            rng.choice(["", "", "one", "other"]),
        )
        for _ in range(rng.choice([0, 0, 1, 2]))
    )


def step_seconds(batch: ScheduleBatch) -> float:
    """Grows with the square of what a step computes, so that chunks are fitted to their history."""
    square = sum(
        new * (new + 2 * before)
        for new, before in zip(batch.extend_lens, batch.prefix_lens, strict=True)
    )
    return 0.001 + 1e-4 * batch.prefill_tokens + 1e-6 * square + 1e-4 * (batch.step % 7)


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    page = draw(st.sampled_from([1, 16, 64]))
    pages = draw(st.integers(6, {1: 120, 16: 40, 64: 14}[page]))
    chunk = draw(st.sampled_from([0, 2, 3, 8])) * page
    most = draw(st.sampled_from([2, 8, 1000])) * page
    return SchedulerConfig(
        page_size=page,
        capacity_tokens=pages * page + draw(st.integers(0, page - 1)),
        context_length=draw(st.sampled_from([60, 5000, 5000])),
        eos_token_ids=frozenset([EOS]),
        max_running_requests=draw(st.integers(1, 8)),
        chunked_prefill_size=chunk,
        max_prefill_tokens=most,
        prefill_share=draw(st.sampled_from([0.0, 0.25, 0.25, 0.9])),
        max_prefill_requests=draw(st.sampled_from([0, 0, 1, 2])),
        truncation_align_size=draw(st.sampled_from([0, 0, 2 * page, min(chunk, most)])),
        disable_mixed_chunk=draw(st.sampled_from([False, False, True])),
        disable_radix_cache=draw(st.sampled_from([False, False, True])),
        eviction_policy=draw(st.sampled_from(tuple(EVICTION_POLICIES))),
        pin_share=draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])),
        schedule_policy=draw(st.sampled_from(tuple(POLICIES))),
        max_queue_skip_ms=draw(st.sampled_from([0.0, 50.0, 2000.0])),
        schedule_conservativeness=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        clip_max_new_tokens=draw(st.sampled_from([4, 4096])),
        enable_dynamic_chunking=draw(st.booleans()),
        tpot_slo_ms=draw(st.sampled_from([0.0, 0.0, 3.0])),
        step_bound_ms=draw(st.sampled_from([0.0, 0.0, 3.0])),
        enable_prefill_delayer=draw(st.sampled_from([False, True])),
        delayer_max_passes=draw(st.integers(0, 5)),
        max_queued_requests=draw(st.sampled_from([0, 0, 4, 12])),
        priority_preemption_threshold=draw(st.sampled_from([0, 5])),
        disable_priority_preemption=draw(st.booleans()),
        kv_tier_pages=draw(st.sampled_from([0, 3, pages, 4 * pages])),
        kv_load_tokens=draw(st.sampled_from([0, 0, 0, 3])) * page,
        waiting_timeout_s=draw(st.sampled_from([0.0, 0.0, 0.0, 0.5])),
        running_timeout_s=draw(st.sampled_from([0.0, 0.0, 0.0, 0.5])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    steps = 0  # passes over all examples
    acquitted = 0  # requests that had read what was no number, and were computed alone

    @initialize(made=configs(), overlap=st.booleans(), guilty=st.sampled_from([0, 0, 7]))
    def start(self, made: SchedulerConfig, overlap: bool, guilty: int) -> None:
        """guilty: one request in so many makes every step raise that computes its third token."""
        self.driver = Driver(made, overlap=overlap, script=script, checked=False)
        self.driver.guilty = self.is_guilty
        self.guilty_one_in = guilty
        self.scheduler = self.driver.scheduler
        mixing, cache = not made.disable_mixed_chunk, not made.disable_radix_cache
        self.model = NaiveModel(self.scheduler, self.driver.device, mixing, cache)
        self.grammars: list[SwitchGrammar] = []
        self.frozen: dict[str, int] = {}  # tokens given when the end was recorded
        self.count = 0

    @rule(
        seed=st.integers(0, 1 << 30),
        count=st.integers(1, 8),
        family=st.integers(0, 2),
        extra=st.sampled_from(
            ["", "", "", "grammar", "mask", "taking", "deadline", "ignore_eos", "logprobs"]
        ),
    )
    def add(self, seed: int, count: int, family: int, extra: str) -> None:
        """A burst of requests of one kind, some with a prefix in common."""
        rng = random.Random(seed)
        common = rng.choice([0.0, 0.1, 0.2, 0.4])
        for _ in range(count):
            self.add_one(rng, family, common, extra)
        self.check()

    def is_guilty(self, batch: ScheduleBatch) -> bool:
        every = self.guilty_one_in
        return bool(every) and any(
            int(batch.requests[b].request_id[1:]) % every == 0 and count == 2
            for b, count in zip(batch.sampled, batch.output_counts, strict=True)
        )

    def add_one(
        self,
        rng: random.Random,
        family: int,
        common: float,
        extra: str,
        priority: int | None = None,
    ) -> None:
        capacity = self.capacity
        shared = [10_000 * (family + 1) + i for i in range(int(common * capacity))]
        own = rng.randint(1, max(capacity // rng.choice([3, 6, 20]), 1))
        if shared and rng.random() < 0.25:
            own = 0  # the same prompt again
        unique = [100_000 + self.count * 3000 + i for i in range(own)]
        options: dict[str, Any] = {}
        if extra in ("grammar", "mask", "taking"):
            fault = "" if extra == "grammar" else extra
            self.grammars.append(SwitchGrammar(fault, rng.choice([0, 0, 1, 2, 7])))
            options["grammar"] = self.grammars[-1]
        if extra == "deadline":
            options["deadline_s"] = self.driver.now + 0.3
        if extra == "logprobs":
            options["prompt_logprobs"] = 0
        options["pins"] = random_pins(random.Random(self.count), len(shared) + len(unique))
        choices = [
            request(
                f"r{self.count + choice}",
                shared + unique,
                rng.choice([1, 10, max(capacity // 8, 1), max(capacity // 3, 1)]),
                arrival_s=self.driver.now,
                priority=level,
                namespace=namespace,
                min_tokens=rng.choice([0, 0, 3]),
                ignore_eos=extra == "ignore_eos",
                **options,
            )
            for level in [rng.choice([0, 0, 0, 3, 10]) if priority is None else priority]
            for namespace in [rng.choice(["", "", "", "salt"])]
            for choice in range(rng.choice([1, 1, 1, 3]))
        ]
        self.count += len(choices)
        waiting = self.scheduler.statistics().waiting
        with suppress(ContextTooLong, QueueFull, InvalidRequest):
            self.driver.collect(self.scheduler.add_group(choices, self.driver.now))
            for made in choices:
                self.driver.tokens[made.request_id] = []
                self.model.added(made)
            return
        assert self.scheduler.statistics().waiting == waiting, "refused, and somebody had to go"

    @rule(seed=st.integers(0, 1 << 30), family=st.integers(0, 2))
    def push_in(self, seed: int, family: int) -> None:
        """The queue fills up; then comes somebody more important, for whom others must go."""
        rng = random.Random(seed)
        cap = self.scheduler.config.max_queued_requests
        for _ in range(min(cap, 6)):
            self.add_one(rng, family, 0.1, "", priority=rng.choice([0, 3]))
        for _ in range(3):
            self.add_one(rng, family, 0.1, rng.choice(["", "mask"]), priority=10)
            self.plan()
            self.settle_if_any()
        self.check()

    @rule(
        share=st.sampled_from([0.2, 0.4, 0.6]),
        crowd=st.sampled_from([0.3, 0.6, 0.9]),
        pages=st.sampled_from([None, None, 0, 1]),
    )
    def come_back(self, share: float, crowd: float, pages: int | None) -> None:
        """A conversation goes on, after others have taken most of the pool. Args: pages: of a load
        that can be read; None: all."""
        before = self.add_prompt(share, 110_000)
        self.turn(12)
        self.add_prompt(crowd, 100_000 + self.count * 3000)
        self.turn(12)
        self.add_prompt(share, 110_000, [*before.output_ids, 7])
        self.turn(2, copies=False)
        for load_id in list(self.driver.device.tier.loads):
            self.driver.finish_load(load_id, pages)
        self.check()

    def add_prompt(self, share: float, first: int, more: Sequence[int] = ()) -> Request:
        """A request whose prompt takes this share of the pool, and goes on with `more`."""
        tokens = range(first, first + int(share * self.scheduler.config.usable_tokens))
        made = request(f"r{self.count}", [*tokens, *more], 5, arrival_s=self.driver.now)
        self.count += 1
        with suppress(ContextTooLong, QueueFull):
            self.driver.add(made)
            self.model.added(made)
        return made

    @rule(turns=st.integers(1, 12), copies=st.booleans())
    def turn(self, turns: int, copies: bool = True) -> None:
        """The loop as the engine runs it. Args: copies: those to and from the tier are done in
        time."""
        for _ in range(turns):
            planned = self.plan()
            keep = 1 if self.driver.overlap and planned else 0
            while len(self.driver.in_flight) > keep:
                self.settle()
            if copies:
                self.driver.finish_tier()
            self.driver.now += 0.01

    @rule()
    def plan_early(self) -> None:
        """A pass at a moment of its own, two steps in flight at most."""
        self.plan()

    @precondition(lambda self: self.driver.device.tier.copies)
    @rule(pick=st.integers(0, 7), pages=st.sampled_from([None, None, 0, 1]))
    def finish_a_copy(self, pick: int, pages: int | None) -> None:
        """In whatever order, and not always whole."""
        copies = sorted(self.driver.device.tier.copies)
        self.driver.finish_copy(copies[pick % len(copies)], pages)
        self.check()

    @precondition(lambda self: self.driver.device.tier.loads)
    @rule(pick=st.integers(0, 7), pages=st.sampled_from([None, None, 0, 1, 2]))
    def finish_a_load(self, pick: int, pages: int | None) -> None:
        loads = sorted(self.driver.device.tier.loads)
        self.driver.finish_load(loads[pick % len(loads)], pages)
        self.check()

    @rule()
    def plan_and_fail_to_launch(self) -> None:
        self.plan(launches=False)

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def settle_late(self) -> None:
        self.settle()

    @precondition(lambda self: self.driver.in_flight)
    @rule(tables=st.booleans())
    def fail_step(self, tables: bool) -> None:
        self.driver.fail(tables=tables)
        self.model.failed()
        self.check()

    @precondition(lambda self: self.driver.in_flight)
    @rule(pick=st.integers(0, 7))
    def give_no_number(self, pick: int) -> None:
        """A row of the oldest step in flight gives no token."""
        self.settle(pick)

    @rule(tables=st.booleans())
    def fail_between_two_pieces(self, tables: bool) -> None:
        """A step fails that computes a piece of a prompt, the next piece being in flight."""
        for _ in range(8):
            flights = [batch.requests[: batch.num_prefill] for batch, _ in self.driver.in_flight]
            if len(flights) == 2 and set(flights[0]).intersection(flights[1]):
                self.fail_step(tables)
                return
            if len(flights) == 2 or not self.plan():
                self.settle_if_any()

    @rule(seed=st.integers(0, 1000))
    def build_on_a_prompt_without_number(self, seed: int) -> None:
        """A prompt gives no number after another has started from it."""
        for _ in range(8):
            if self.driver.in_flight:
                batch, output = self.driver.in_flight[-1]
                places = [i for i, b in enumerate(batch.sampled) if b < batch.num_prefill]
                if places and output is not None and not self.driver.guilty(batch):
                    break
            if len(self.driver.in_flight) == 2 or not self.plan():
                self.settle_if_any()
        else:
            return
        while len(self.driver.in_flight) > 1:
            self.settle()
            if not self.driver.in_flight:
                return
        first = batch.requests[batch.sampled[places[seed % len(places)]]]
        made = request(
            f"r{self.count}",
            [*first.input_ids, *range(900_000 + seed, 900_000 + seed + 3)],
            5,
            arrival_s=self.driver.now,
            priority=10,
            namespace=first.namespace,
        )
        self.count += 1
        with suppress(ContextTooLong, QueueFull):
            self.driver.add(made)
            self.model.added(made)
        self.plan()
        self.settle(places[seed % len(places)])

    @precondition(lambda self: self.model.lives)
    @rule(pick=st.integers(0, 1000), for_ever=st.booleans())
    def spoil(self, pick: int, for_ever: bool) -> None:
        """A request computes no numbers any more, or none until it starts anew."""
        live = [life.request for life in self.model.lives.values() if not life.request.finish]
        if live:
            made = live[pick % len(live)]
            admission = made.scheduling.admissions + (made.row < 0)
            self.driver.device.spoilers[made.request_id] = None if for_ever else admission

    @rule(seed=st.integers(0, 1 << 30), leaves=st.booleans())
    def leave_rubbish_behind(self, seed: int, leaves: bool) -> None:
        """A prompt that computes no numbers leaves between two of its pieces, and others begin as it
        did."""
        rng = random.Random(seed)
        most = min(self.capacity // 2, self.scheduler.config.context_length // 2)
        tokens = range(500_000 + seed % 1000, 500_000 + seed % 1000 + most)
        name = self.add_tokens(tokens, priority=10)
        if name is None:
            return
        self.driver.device.spoilers[name] = None
        made, pieces = self.model.lives[name].request, rng.randint(2, 3)
        for _ in range(12):
            while len(self.driver.in_flight) > self.driver.overlap:
                self.settle()
            if not pieces or not self.plan():
                break
            pieces -= made in self.driver.in_flight[-1][0].requests
        if leaves and self.scheduler.abort(name):
            self.model.marked(name)
            self.frozen.setdefault(name, 0)
        for _ in range(rng.randint(1, 3)):
            own = range(900_000 + self.count, 900_000 + self.count + rng.randint(1, 40))
            shared = tokens[: rng.randint(len(tokens) // 3, len(tokens))]
            self.add_tokens([*shared, *own], rng.choice([0, 10]))
        self.check()

    def add_tokens(self, tokens: Sequence[int], priority: int) -> str | None:
        made = request(f"r{self.count}", tokens, 5, arrival_s=self.driver.now, priority=priority)
        with suppress(ContextTooLong, QueueFull):
            self.driver.add(made)
            self.model.added(made)
            self.count += 1
            return made.request_id
        return None

    @property
    def capacity(self) -> int:
        return self.scheduler.config.usable_tokens

    def settle_if_any(self) -> None:
        if self.driver.in_flight:
            self.settle()

    @precondition(lambda self: self.model.lives)
    @rule(pick=st.integers(0, 1000), kind=st.sampled_from(["abort", "abort", "finish"]))
    def end_one(self, pick: int, kind: str) -> None:
        live = [name for name, life in self.model.lives.items() if not life.request.finish]
        if not live:
            assert not self.scheduler.abort("nobody")
            return
        name = live[pick % len(live)]
        seen = bool(self.model.lives[name].request.output_ids)
        before = self.model.lives[name].ending
        if kind == "finish" and seen:
            taken = self.scheduler.finish(name, Finish(FinishReason.STOP, "text"))
        else:
            taken = self.scheduler.abort(name)
        assert taken != before
        self.model.marked(name)
        self.frozen.setdefault(name, len(self.driver.tokens[name]))

    @rule(seconds=st.sampled_from([0.02, 0.02, 0.4]))
    def pass_time(self, seconds: float) -> None:
        self.driver.now += seconds

    @precondition(lambda self: self.grammars)
    @rule()
    def compile_grammars(self) -> None:
        for grammar in self.grammars:
            grammar.ready = True

    @rule()
    def flush(self) -> None:
        idle = not self.scheduler.has_unfinished and not self.driver.device.tier.loads
        assert self.scheduler.flush() == idle
        if idle:
            assert self.scheduler.statistics().cached_tokens == 0
            self.model.kept.clear()
        self.check()

    @rule(
        policy=st.sampled_from(tuple(POLICIES)),
        eviction=st.sampled_from(tuple(EVICTION_POLICIES)),
        mixing=st.booleans(),
        conservativeness=st.sampled_from([0.0, 1.0]),
        share=st.sampled_from([0.0, 0.5]),
        pins=st.sampled_from([0.0, 0.5, 0.5]),
    )
    def change_options(
        self,
        policy: str,
        eviction: str,
        mixing: bool,
        conservativeness: float,
        share: float,
        pins: float,
    ) -> None:
        self.scheduler.change_options(
            schedule_policy=policy,
            eviction_policy=eviction,
            disable_mixed_chunk=not mixing,
            schedule_conservativeness=conservativeness,
            prefill_share=share,
            pin_share=pins,
        )
        self.model.mixing = mixing
        self.model.pins_bounded()
        self.check()

    def teardown(self) -> None:
        """Arrivals stop: everything ends, with the right tokens, and gives everything back."""
        if not hasattr(self, "driver"):
            return
        self.compile_grammars()
        self.driver.now += 0.01
        for _ in range(10_000):
            if not self.scheduler.has_unfinished:
                break
            self.turn(1)
        self.driver.finish_tier()
        assert not self.scheduler.has_unfinished, self.scheduler.statistics()
        self.driver.assert_all_free()
        for name, life in self.model.lives.items():
            self._check_answer(name, life.request)
        type(self).acquitted += self.model.acquitted

    # The loop's parts

    def plan(self, *, launches: bool = True) -> bool:
        holders = {
            name
            for name, life in self.model.lives.items()
            if life.request.row >= 0 and not life.request.finish
        }
        self.model.planning(self.driver.now)
        plan = self.driver.plan(launches=launches)
        type(self).steps += 1
        self.model.planned(plan.batch, holders)
        if plan.batch is None:
            assert plan.reason
            if plan.reason == "wait_commit":
                assert self.driver.in_flight
        self.ask_for_masks()
        self.check()
        return plan.batch is not None

    def ask_for_masks(self) -> None:
        """The next step to sample is; a grammar that raises ends its request, and nobody else's."""
        if not self.driver.in_flight:
            return
        batch, _ = self.driver.in_flight[0]
        for b, index in zip(batch.sampled, batch.output_counts, strict=True):
            self.ask(batch.requests[b], "mask", index)

    def ask(self, made: Any, what: str, index: int) -> None:
        grammar = made.grammar
        if grammar is None or (grammar.fault, grammar.index) != (what, index):
            return
        name = made.request_id
        if made.ending is None and self.scheduler.finish(name, GRAMMAR_FAULT):
            self.model.marked(name)
            self.frozen.setdefault(name, len(self.driver.tokens[name]))

    def settle(self, bad: int | None = None) -> None:
        """Commits the oldest step in flight, the sampled row `bad` without a token; or fails it."""
        batch, output = self.driver.in_flight[0]
        if output is None or self.driver.guilty(batch):
            self.driver.fail()
            self.model.failed()
        else:
            output.device_s = step_seconds(batch)
            failed = [bad % len(batch.sampled)] if bad is not None and batch.sampled else []
            news: list[RequestOutput] = []

            def commit() -> StepOutput:
                news.extend(self.driver.commit(failed))
                return output

            self.model.commit(commit, self.driver.now)
            for output_of_one in news:
                made = output_of_one.request
                if output_of_one.token_ids:
                    self.ask(made, "taking", len(made.output_ids) - 1)
        self.ask_for_masks()
        self.check()

    def check(self) -> None:
        self.scheduler.check()
        self.model.check()

    def _check_answer(self, name: str, made: Any) -> None:
        tokens = self.driver.tokens[name]
        assert tokens == list(made.output_ids)
        assert len(tokens) == self.frozen.get(name, len(tokens)), "a token after the end"
        sampled = [script(name, index) for index in range(made.max_new_tokens)]
        assert tokens == sampled[: len(tokens)], "tokens lost, doubled or out of order"
        count, reason = expected_tokens(made, sampled, frozenset([EOS]))
        assert made.finish is not None
        natural = made.finish.reason.value in ("stop", "length") and made.finish.matched != "text"
        if natural:
            assert (len(tokens), made.finish.reason.value) == (count, reason)
        else:
            assert len(tokens) <= count


class TieredMachine(SchedulerMachine):
    """The same over a pool with a tier below it, from which much comes back."""

    steps = 0
    loaded_tokens = 0
    failed_loads = 0

    @initialize(
        made=configs(),
        tier=st.sampled_from([3, 20, 200]),
        overlap=st.booleans(),
        guilty=st.sampled_from([0, 0, 7]),
    )
    def start(self, made: SchedulerConfig, tier: int, overlap: bool, guilty: int) -> None:
        made = replace(made, disable_radix_cache=False, kv_tier_pages=tier)
        super().start(made=made, overlap=overlap, guilty=guilty)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "driver"):
            type(self).loaded_tokens += self.scheduler.counters.loaded_tokens
            type(self).failed_loads += self.scheduler.counters.failed_loads


@pytest.mark.slow
def test_random_lives_break_no_rule() -> None:
    SchedulerMachine.steps = SchedulerMachine.acquitted = 0
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=200,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert SchedulerMachine.steps >= STEPS
    assert SchedulerMachine.acquitted >= 1


@pytest.mark.slow
def test_random_lives_over_a_tier_break_no_rule() -> None:
    TieredMachine.steps = TieredMachine.loaded_tokens = TieredMachine.failed_loads = 0
    run_state_machine_as_test(
        TieredMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert TieredMachine.loaded_tokens > 0
    assert TieredMachine.failed_loads > 0


def test_an_ended_request_lets_go_of_what_a_failed_step_put_into_the_cache() -> None:
    """Found by random lives: r3 starts from what step 0 is to write, and ends; then step 0 fails."""
    state = SchedulerMachine()
    made = SchedulerConfig(
        page_size=64,
        max_running_requests=4,
        chunked_prefill_size=128,
        max_prefill_tokens=512,
        max_prefill_requests=2,
        truncation_align_size=128,
        disable_mixed_chunk=True,
        schedule_policy="hrrn",
        enable_prefill_delayer=True,
        delayer_max_passes=2,
        disable_priority_preemption=True,
        eviction_policy="lfu",
        max_queue_skip_ms=0.0,
        schedule_conservativeness=0.0,
        clip_max_new_tokens=4,
        max_queued_requests=4,
        priority_preemption_threshold=5,
        capacity_tokens=389,
        context_length=5000,
        eos_token_ids=frozenset({EOS}),
    )
    state.start(made=made, guilty=0, overlap=True)
    state.pass_time(seconds=0.02)
    state.plan_and_fail_to_launch()
    state.plan_and_fail_to_launch()
    state.add(count=7, extra="deadline", family=0, seed=1865)
    state.plan_and_fail_to_launch()
    state.end_one(kind="finish", pick=308)
    state.add(count=7, extra="", family=2, seed=0)
    state.end_one(kind="abort", pick=128)
    state.plan_and_fail_to_launch()
    assert len(state.driver.in_flight) == 2
    state.end_one(kind="abort", pick=121)
    state.end_one(kind="finish", pick=82)
    state.plan_and_fail_to_launch()
    state.fail_step(tables=True)
    assert state.scheduler.statistics().protected_tokens == 0
    state.teardown()


def test_the_naive_model_refuses_what_was_never_written() -> None:
    driver = Driver(SchedulerConfig(page_size=1, capacity_tokens=101, context_length=60))
    model = NaiveModel(driver.scheduler, driver.device, mixing=True, cache=True)
    made = request("r0", 20, 1)
    driver.add(made)
    model.added(made)
    model.planned(driver.plan().batch, set())
    _, output = driver.in_flight[0]
    assert output is not None

    def commit() -> StepOutput:
        driver.commit()
        return output

    model.commit(commit)
    model.check()
    (root,) = driver.scheduler._memory.cache.tree.roots.values()
    (node,) = root.children.values()
    driver.device.slots[node.pages[7]] = 0
    with pytest.raises(AssertionError, match="7 tokens and the next 1 can be matched"):
        model.check()
