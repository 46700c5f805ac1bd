"""The engine's loop over a fake device, every rule checked after every call: what random lives are
made of."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine

from runtime.config import SchedulerConfig
from runtime.errors import ContextTooLong, QueueFull
from runtime.request import Finish, FinishReason, Request, RequestOutput
from runtime.runner import StepOutput
from runtime.scheduling.schedule_batch import ScheduleBatch
from tests.runtime.scheduling.naive_model import NaiveModel, expected_tokens
from tests.runtime.scheduling.random_lives import SwitchGrammar, script, step_seconds
from tests.runtime.scheduling.scheduler_harness import EOS, Driver, request

GRAMMAR_FAULT = Finish(FinishReason.ERROR, message="the output cannot be processed")


class CheckedLoop(RuleBasedStateMachine):
    """A scheduler with its driver and the naive model of it.

    Attributes:
        count: requests so far. frozen: tokens that one had given when its end was recorded.
    """

    steps = 0  # passes over all examples
    cleared = 0  # requests that had read NaN, and were computed in isolation

    def begin(self, made: SchedulerConfig, overlap: bool, guilty: int) -> None:
        """Args: guilty: one request in so many makes every step raise that computes its third token."""
        self.driver = Driver(made, overlap=overlap, script=script, checked=False)
        self.driver.guilty = self.is_guilty
        self.guilty_one_in = guilty
        self.scheduler = self.driver.scheduler
        mixing, cache = not made.disable_mixed_chunk, not made.disable_radix_cache
        self.model = NaiveModel(self.scheduler, self.driver.device, mixing=mixing, cache=cache)
        self.grammars: list[SwitchGrammar] = []
        self.frozen: dict[str, int] = {}  # tokens given when the end was recorded
        self.count = 0

    def is_guilty(self, batch: ScheduleBatch) -> bool:
        every = self.guilty_one_in
        return bool(every) and any(
            int(batch.requests[b].request_id[1:]) % every == 0 and count == 2
            for b, count in zip(batch.sampled, batch.output_counts, strict=True)
        )

    @property
    def capacity(self) -> int:
        return self.scheduler.config.usable_tokens

    def compile_grammars(self) -> None:
        for grammar in self.grammars:
            grammar.ready = True

    def add_prompt(self, share: float, first: int, more: Sequence[int] = ()) -> Request:
        """A request whose prompt takes this share of the pool, and goes on with `more`."""
        tokens = range(first, first + int(share * self.scheduler.config.usable_tokens))
        made = request(f"r{self.count}", [*tokens, *more], 5, arrival_s=self.driver.now)
        self.count += 1
        with suppress(ContextTooLong, QueueFull):
            self.driver.add(made)
            self.model.added(made)
        return made

    def add_tokens(self, tokens: Sequence[int], priority: int) -> str | None:
        made = request(f"r{self.count}", tokens, 5, arrival_s=self.driver.now, priority=priority)
        with suppress(ContextTooLong, QueueFull):
            self.driver.add(made)
            self.model.added(made)
            self.count += 1
            return made.request_id
        return None

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

    def settle_if_any(self) -> None:
        if self.driver.in_flight:
            self.settle()

    def settle(self, bad: int | None = None) -> None:
        """Commits the oldest step in flight, the sampled row `bad` without a token; or fails it."""
        batch, output = self.driver.in_flight[0]
        if output is None or self.driver.guilty(batch):
            self.driver.fail()
            self.model.failed()
        else:
            output.device_s = step_seconds(batch)
            failed = [bad % len(batch.sampled)] if bad is not None and batch.sampled else []
            anew = [name for name, life in self.model.lives.items() if life.starts_anew]
            news: list[RequestOutput] = []

            def commit() -> StepOutput:
                news.extend(self.driver.commit(failed, anew))
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
        type(self).cleared += self.model.cleared

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
