"""Drives a Scheduler by hand against a fake device that keeps a real (fake) KV memory.

`FakeDevice` stores which token, at which position, was written to every KV slot and runs steps
in launch order, so that each row must read exactly its own history through its table row: aliased
pages, pages freed too early and stale tables all show up as a wrong token in a slot.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from runtime.config import SchedulerConfig
from runtime.request import Request, RequestOutput, SamplingParams
from runtime.runner import StepOutput
from runtime.scheduling.schedule_batch import ScheduleBatch
from runtime.scheduling.scheduler import Plan, Scheduler

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
    )


def scripted_token(request_id: str, index: int) -> int:
    """Output token `index` of a request: the same whenever and beside whomever it is sampled."""
    return 100 + (sum(map(ord, request_id)) * 31 + index * 17) % 800


class FakeDevice:
    """Runs batches in launch order; returns scripted tokens.

    Args:
        script: (request id, output index) to the token that is sampled.
    """

    def __init__(
        self, page_size: int, rows: int, script: Callable[[str, int], int] = scripted_token
    ) -> None:
        self.page_size = page_size
        self.table: list[dict[int, int]] = [{} for _ in range(rows + 1)]
        self.slots: dict[int, tuple[str, int, int]] = {}  # slot: namespace, position, token
        self.next_tokens: dict[int, int] = {}
        self.script = script
        self.written: dict[int, list[int]] = {}  # by step: slots
        # What each request's sequence is on the device, result by result.
        self.sampled: dict[str, list[int]] = {}

    def run(self, batch: ScheduleBatch) -> StepOutput:
        entries = list(zip(batch.table_rows, batch.table_indices, strict=True))
        assert len(set(entries)) == len(entries), "a table entry is written twice in one step"
        assert 0 not in batch.table_rows
        assert 0 not in batch.table_pages
        for (row, index), page in zip(entries, batch.table_pages, strict=True):
            self.table[row][index] = page
        assert len(set(batch.rows)) == len(batch.rows), "two rows of a step share a table row"
        histories = [self._store(batch, b) for b in range(len(batch.requests))]
        for b, history in enumerate(histories):
            self._read(batch, b, history)
        tokens = [self._sample(batch, i, b) for i, b in enumerate(batch.sampled)]
        return StepOutput(tokens)

    def _store(self, batch: ScheduleBatch, b: int) -> list[int]:
        """Writes a row's new KV; returns the tokens the row must see."""
        request, start, length = batch.requests[b], batch.prefix_lens[b], batch.extend_lens[b]
        outputs = self.sampled.setdefault(request.request_id, [])
        history = [*request.input_ids, *outputs][: start + length]
        assert start + length <= len(request.input_ids) + len(outputs)
        if b < batch.num_prefill:
            offset = sum(batch.extend_lens[:b])
            new = list(batch.input_ids[offset : offset + length])
        else:
            assert length == 1
            new = [self.next_tokens[batch.rows[b]]]
        assert new == history[start:], "the step computes other tokens than the request's"
        for position, token in enumerate(new, start):
            slot = self._slot(batch.rows[b], position)
            self.slots[slot] = (request.namespace, position, token)
            self.written.setdefault(batch.step, []).append(slot)
        return history

    def lose(self, batch: ScheduleBatch) -> None:
        """The step failed: what it wrote is rubbish."""
        for slot in self.written[batch.step]:
            self.slots[slot] = ("lost", -1, -1)

    def _read(self, batch: ScheduleBatch, b: int, history: list[int]) -> None:
        namespace = batch.requests[b].namespace
        for position, token in enumerate(history):
            slot = self._slot(batch.rows[b], position)
            assert self.slots[slot] == (namespace, position, token), (
                f"step {batch.step}, {batch.requests[b].request_id}: position {position} holds"
                f" {self.slots[slot]}, expected {token}"
            )

    def _sample(self, batch: ScheduleBatch, i: int, b: int) -> int:
        request = batch.requests[b]
        outputs = self.sampled[request.request_id]
        index = batch.output_counts[i]
        assert batch.sample_positions[i] == batch.prefix_lens[b] + batch.extend_lens[b]
        assert batch.sample_positions[i] == len(request.input_ids) + index
        del outputs[index:]  # the dropped token of a request that was retracted
        token = self.script(request.request_id, index)
        outputs.append(token)
        self.next_tokens[batch.rows[b]] = token
        return token

    def _slot(self, row: int, position: int) -> int:
        page = self.table[row][position // self.page_size]
        return page * self.page_size + position % self.page_size


class Driver:
    """The engine's loop by hand: plan, launch, and commit one step behind when overlapping."""

    def __init__(
        self,
        scheduler_config: SchedulerConfig | None = None,
        *,
        overlap: bool = True,
        script: Callable[[str, int], int] = scripted_token,
        step_s: float = 0.01,
        checked: bool = True,
    ) -> None:
        self.config = scheduler_config or config()
        self.scheduler = Scheduler(self.config)
        self.device = FakeDevice(self.config.page_size, self.config.max_running_requests, script)
        self.overlap = overlap
        self.now = 0.0
        self.step_s = step_s
        self.checked = checked
        self.in_flight: deque[tuple[ScheduleBatch, StepOutput]] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, RequestOutput] = {}
        self.batches: list[ScheduleBatch] = []

    def add(self, *requests: Request) -> None:
        for item in requests:
            self.collect(self.scheduler.add(item, self.now))
            self.tokens.setdefault(item.request_id, [])

    def plan(self) -> Plan:
        """One pass; a batch is launched at once."""
        plan = self.scheduler.plan(self.now)
        self.collect(plan.ended)
        if plan.batch is not None:
            self.batches.append(plan.batch)
            self.in_flight.append((plan.batch, self.device.run(plan.batch)))
        self.verify()
        return plan

    def commit(self) -> list[RequestOutput]:
        """Commits the oldest step in flight."""
        batch, output = self.in_flight.popleft()
        outputs = self.scheduler.commit(batch, output, self.now)
        self.collect(outputs)
        self.verify()
        return outputs

    def step(self) -> Plan:
        """One turn of the loop: plan and launch, then commit what is due."""
        plan = self.plan()
        keep = 1 if self.overlap and plan.batch is not None else 0
        while len(self.in_flight) > keep:
            self.commit()
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
