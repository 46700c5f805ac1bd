"""Drives a Scheduler by hand against a fake device: the engine's loop, one call at a time."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from runtime.config import SchedulerConfig
from runtime.request import PromptPin, Request, RequestOutput, SamplingParams
from runtime.runner import StepOutput
from runtime.scheduling.plan import Plan
from runtime.scheduling.schedule_batch import ScheduleBatch
from runtime.scheduling.scheduler import Scheduler
from tests.runtime.scheduling.fake_device import NAN_LOGITS, FakeDevice, scripted_token

EOS = 2


def config(**changes: Any) -> SchedulerConfig:
    """A small pool: page size 1, room for 200 tokens beside the reserved page, no EOS."""
    values: dict[str, Any] = {
        "page_size": 1,
        "capacity_tokens": 201,
        "context_length": 4096,
        "max_running_requests": 8,
        "chunked_prefill_size": 64,
    }
    return SchedulerConfig(**{**values, **changes})


def request(
    request_id: str,
    tokens: int | Sequence[int],
    max_new: int | None = 4,
    *,
    arrival_s: float = 0.0,
    priority: int = 0,
    namespace: str = "",
    deadline_s: float | None = None,
    grammar: Any = None,
    pins: tuple[PromptPin, ...] = (),
    **sampling: Any,
) -> Request:
    """A request whose tokens are given, or are made unlike any other request's."""
    if isinstance(tokens, int):
        base = 1000 * (1 + sum(map(ord, request_id)) % 997)
        tokens = [base + i for i in range(tokens)]
    return Request(
        request_id,
        array("i", tokens),
        SamplingParams(max_new_tokens=max_new, **sampling),
        arrival_s,
        priority=priority,
        namespace=namespace,
        deadline_s=deadline_s,
        grammar=grammar,
        pins=pins,
    )


class Driver:
    """The engine's loop by hand: plan, launch, and commit one step behind when overlapping.

    Args:
        guilty: whether a step raises for what is in it.
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig | None = None,
        *,
        overlap: bool = True,
        script: Callable[[str, int], int] = scripted_token,
        step_s: float = 0.01,
        checked: bool = True,
        guilty: Callable[[ScheduleBatch], bool] = lambda batch: False,
    ) -> None:
        self.config = scheduler_config or config()
        self.scheduler = Scheduler(self.config)
        self.device = FakeDevice(
            self.config.page_size,
            self.config.max_running_requests,
            script,
            recurrent=self.config.recurrent,
        )
        self.overlap = overlap
        self.now = 0.0
        self.step_s = step_s
        self.checked = checked
        self.guilty = guilty
        # The output of a step that was launched, None of one whose launch raised, or which was
        # launched behind such a one.
        self.in_flight: deque[tuple[ScheduleBatch, StepOutput | None]] = deque()
        self.void: dict[int, set[str]] = {}  # by step: whose rows read NaN
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, RequestOutput] = {}
        self.batches: list[ScheduleBatch] = []

    def add(self, *requests: Request) -> None:
        for item in requests:
            self.collect(self.scheduler.add(item, self.now))
            self.tokens.setdefault(item.request_id, [])

    def plan(self, *, launches: bool = True) -> Plan:
        """One pass; a batch is launched at once.

        Args:
            launches: the launch does not raise.
        """
        plan = self.scheduler.plan(self.now)
        self.collect(plan.ended)
        batch = plan.batch
        if batch is not None:
            self.batches.append(batch)
            output = None
            behind_a_failed = bool(self.in_flight) and self.in_flight[-1][1] is None
            if launches and not behind_a_failed:
                output = self.device.run(batch)
            self.in_flight.append((batch, output))
        self._begin(plan)
        self.verify()
        return plan

    def _begin(self, plan: Plan) -> None:
        """Copies and loads are on their way; until they are done their pages may hold anything."""
        tier = self.device.tier
        for copy in plan.copies:
            tier.copies[copy.copy_id] = copy
        for load in plan.loads:
            tier.loads[load.load_id] = load
            for page in load.pages:
                self.device.write_page(page, [0] * self.config.page_size)

    def finish_copy(self, copy_id: int, pages: int | None = None) -> None:
        """A copy is done. It has read its pages as late as it could.

        Args: pages: how many could be read; None: all.
        """
        tier = self.device.tier
        copy = tier.copies.pop(copy_id)
        count = len(copy.pages) if pages is None else min(pages, len(copy.pages))
        for page, frame in zip(copy.pages[:count], copy.frames, strict=False):
            tier.frames[frame], tier.writers[frame] = self.device.read_page(page)
        self.scheduler.stored(copy_id, count)
        self.verify()

    def finish_load(self, load_id: int, pages: int | None = None) -> None:
        """A load is done; what could not be read is rubbish. Args: as `finish_copy`."""
        tier = self.device.tier
        load = tier.loads.pop(load_id)
        count = len(load.pages) if pages is None else min(pages, len(load.pages))
        for page, frame in zip(load.pages[:count], load.frames, strict=False):
            self.device.write_page(page, tier.frames[frame])
        self.scheduler.loaded(load_id, count)
        self.verify()

    def finish_tier(self) -> None:
        """Whatever is on its way to the tier or from it arrives."""
        for copy_id in list(self.device.tier.copies):
            self.finish_copy(copy_id)
        for load_id in list(self.device.tier.loads):
            self.finish_load(load_id)

    def commit(self, failed: Sequence[int] = (), anew: Collection[str] = ()) -> list[RequestOutput]:
        """Commits the oldest step in flight.

        Args:
            failed: of its sampled rows, those that give no token.
            anew: who starts anew already: what their rows give says nothing.
        """
        batch, output = self.in_flight.popleft()
        assert output is not None, "its launch raised"
        void = self.void.pop(batch.step, set()).union(anew)
        later = [other for other, _ in self.in_flight]
        output.failed.update(dict.fromkeys(failed, NAN_LOGITS))
        self.device.gave_tokens(
            batch,
            [
                b
                for i, b in enumerate(batch.sampled)
                if i not in output.failed and batch.requests[b].request_id not in void
            ],
        )
        for index in output.failed:
            b = batch.sampled[index]
            if batch.requests[b].request_id in void:
                continue  # for what others had computed: it says nothing of its earlier pieces
            spoilt, nan_rows = self.device.give_nan(batch, b, later)
            for other, given in self.in_flight:
                self.void.setdefault(other.step, set()).update(spoilt)
                if given is not None:
                    places = enumerate(other.requests[row].request_id for row in other.sampled)
                    given.failed |= {i: NAN_LOGITS for i, name in places if name in nan_rows}
        outputs = self.scheduler.commit(batch, output, self.now)
        self.device.done(batch)
        for news in outputs:
            assert not news.token_ids or news.request.request_id not in void, "a token of rubbish"
        self.collect(outputs)
        self.verify()
        return outputs

    def fail(self, *, tables: bool = True) -> list[RequestOutput]:
        """Fails the oldest step in flight; the device is lost with it.

        Args:
            tables: what the lost steps wrote into the block table is there.
        """
        batches = [batch for batch, _ in self.in_flight]
        self.in_flight.clear()
        self.void.clear()
        self.device.lose(batches, tables=tables)
        outputs = self.scheduler.fail(batches[0], "the step failed", self.now)
        assert len(outputs) <= 1
        assert not outputs or len(batches[0].requests) == 1, "ended, though others were beside it"
        self.collect(outputs)
        self.verify()
        return outputs

    def settle(self) -> list[RequestOutput]:
        """Commits the oldest step in flight, or fails it."""
        batch, output = self.in_flight[0]
        return self.fail() if output is None or self.guilty(batch) else self.commit()

    def step(self) -> Plan:
        """One turn of the loop: plan and launch, then commit what is due."""
        plan = self.plan()
        keep = 1 if self.overlap and plan.batch is not None else 0
        while len(self.in_flight) > keep:
            self.settle()
        self.finish_tier()
        self.now += self.step_s
        return plan

    def run(self, turns: int = 10_000) -> Driver:
        """Turns the loop until nothing is left."""
        for _ in range(turns):
            if not self.scheduler.has_unfinished:
                return self
            self.step()
        raise AssertionError(f"not done after {turns} turns: {self.scheduler.statistics()}")

    def verify(self) -> None:
        if self.checked:
            self.scheduler.check()

    def collect(self, outputs: list[RequestOutput]) -> None:
        for news in outputs:
            name = news.request.request_id
            assert name not in self.ended, f"{name} has news after its end"
            self.tokens.setdefault(name, []).extend(news.token_ids)
            if news.finish is not None:
                self.ended[name] = news

    def reason(self, request_id: str) -> str:
        """How a request ended."""
        finish = self.ended[request_id].finish
        assert finish is not None
        return finish.reason.value

    def reason_or_none(self, request_id: str) -> str | None:
        return self.reason(request_id) if request_id in self.ended else None

    def assert_all_free(self) -> None:
        """Idle: every row free, nothing locked, free + cached + page 0 = capacity."""
        stats = self.scheduler.statistics()
        self.scheduler.check()
        assert not self.scheduler.has_unfinished
        assert stats.free_rows == self.config.max_running_requests
        assert stats.protected_tokens == 0
        assert stats.private_tokens == 0
        assert stats.reserved_tokens == self.config.page_size
        assert (
            stats.free_tokens + stats.cached_tokens + self.config.page_size == stats.capacity_tokens
        )


def names(batch: ScheduleBatch | None) -> list[str]:
    """Whose rows a step has, in its order."""
    assert batch is not None
    return [made.request_id for made in batch.requests]


def assert_answers(driver: Driver, lengths: dict[str, int]) -> None:
    """These requests have ended by length, with the tokens that the device's script gives."""
    for name, length in lengths.items():
        assert driver.tokens[name] == [scripted_token(name, i) for i in range(length)], name
        assert driver.reason(name) == "length"
