"""Random lives of a scheduler: what may happen to it, in any order."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from runtime.config import SchedulerConfig
from runtime.errors import ContextTooLong, InvalidRequest, QueueFull
from runtime.request import Finish, FinishReason
from runtime.scheduling.policies import EVICTION_POLICIES, POLICIES
from tests.runtime.scheduling.checked_loop import CheckedLoop
from tests.runtime.scheduling.random_lives import SwitchGrammar, configs, random_pins
from tests.runtime.scheduling.scheduler_harness import request


class SchedulerMachine(CheckedLoop):
    """Requests come and go, steps are planned, committed and lost, options change."""

    @initialize(made=configs(), overlap=st.booleans(), guilty=st.sampled_from([0, 0, 7]))
    def start(self, made: SchedulerConfig, overlap: bool, guilty: int) -> None:
        self.begin(made, overlap, guilty)

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

    @rule(turns=st.integers(1, 12), copies=st.booleans())
    def turn(self, turns: int, copies: bool = True) -> None:
        super().turn(turns, copies)

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
    def give_nan(self, pick: int) -> None:
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
    def build_on_a_nan_prompt(self, seed: int) -> None:
        """A prompt gives NaN after another has started from it."""
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
        """A request computes NaN from now on, or until it starts anew."""
        live = [life.request for life in self.model.lives.values() if not life.request.finish]
        if live:
            made = live[pick % len(live)]
            admission = made.scheduling.admissions + (made.row < 0)
            self.driver.device.spoilers[made.request_id] = None if for_ever else admission

    @rule(seed=st.integers(0, 1 << 30), leaves=st.booleans())
    def leave_rubbish_behind(self, seed: int, leaves: bool) -> None:
        """A prompt that computes NaN leaves between two of its pieces, and others begin as it
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
        super().compile_grammars()

    @rule()
    def flush(self) -> None:
        idle = not self.scheduler.has_unfinished and not self.driver.device.tier.loads
        assert self.scheduler.flush() == idle
        if idle:
            assert self.scheduler.statistics().cached_tokens == 0
            self.model.pins.kept.clear()
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
        self.model.pins.bounded()
        self.check()


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


class RecurrentMachine(SchedulerMachine):
    """The same for a model whose cached prefixes are of use only where a state is saved."""

    steps = 0
    cached_tokens = 0
    cleared = 0

    @initialize(
        made=configs(),
        slots=st.sampled_from([0, 2, 20]),
        interval=st.sampled_from([1, 20, 100]),
        overlap=st.booleans(),
        guilty=st.sampled_from([0, 0, 7]),
    )
    def start(
        self, made: SchedulerConfig, slots: int, interval: int, overlap: bool, guilty: int
    ) -> None:
        made = replace(
            made, recurrent=True, kv_tier_pages=0, state_slots=slots, state_interval=interval
        )
        super().start(made=made, overlap=overlap, guilty=guilty)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "driver"):
            type(self).cached_tokens += self.scheduler.counters.cached_tokens
