"""Scheduler, runner, store and file together: what comes back from the tier gives the tokens that
it would give if it were computed, also to the next process."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ops.cpu.op_set import CpuOps
from runtime.config import SchedulerConfig
from runtime.execution.model_runner import ModelRunner
from runtime.execution.page_mover import PageMover
from runtime.offload.page_file import PageFile
from runtime.offload.page_store import PageStore
from runtime.request import Request, SamplingParams
from runtime.scheduling.kv_tier import TierPrefix
from runtime.scheduling.scheduler import Scheduler
from tests.ops.gpu.tiny_decoder import PAGE_SIZE, make_device, make_runner
from tests.runtime.execution.drivers import request

POOL_TOKENS = 48 * PAGE_SIZE
CONVERSATION = [(7 * at) % 200 for at in range(120)]
OTHERS = [(11 * at + 5) % 200 for at in range(150)]


@dataclass
class Process:
    """A server without HTTP. Everything on its way to the tier or back is waited for only where
    there is nothing else to do."""

    runner: ModelRunner
    scheduler: Scheduler
    store: PageStore
    told: queue.SimpleQueue[tuple[str, int, int]]
    computed: int = 0

    def serve(self, made: Request) -> list[int]:
        self.scheduler.add(made, 0.0)
        while self.scheduler.has_unfinished:
            plan = self.scheduler.plan(0.0)
            self.store.begin(plan.copies, plan.loads)
            if plan.batch is not None:
                step = self.runner.launch(plan.batch)
                step.sample(None)
                self.computed += plan.batch.prefill_tokens
                self.scheduler.commit(plan.batch, step.result(), 0.0)
            elif plan.reason == "kv_load":
                self.hear(self.told.get(timeout=30))
        self.scheduler.check()
        return list(made.output_ids)

    def hear(self, news: tuple[str, int, int]) -> None:
        kind, number, pages = news
        if kind == "stored":
            self.store.keep(number, self.scheduler.stored(number, pages))
        else:
            self.scheduler.loaded(number, pages)

    def copy_all(self) -> None:
        """Until nothing is left to copy."""
        while True:
            plan = self.scheduler.plan(0.0)
            self.store.begin(plan.copies, plan.loads)
            if not self.scheduler.copies_pending:
                return
            self.hear(self.told.get(timeout=30))

    def end(self) -> None:
        self.store.close()
        self.runner.close()


def begin(path: Path | None, memory_frames: int = 1000) -> Process:
    runner = make_runner(make_device(CpuOps()), total_tokens=POOL_TOKENS)
    mover = PageMover(runner.device, runner.memory.pool, PAGE_SIZE)
    file = None
    prefixes: list[TierPrefix] = []
    keys: dict[int, bytes] = {}
    if path is not None:
        size = mover.page_bytes
        file = PageFile(path, b"tiny", page_bytes=size, frames=200, most_bytes=64 << 20)
        prefixes, keys = file.prefixes()
    config = SchedulerConfig(
        page_size=PAGE_SIZE,
        capacity_tokens=POOL_TOKENS,
        context_length=256,
        max_running_requests=8,
        chunked_prefill_size=32,
        kv_tier_pages=200,
    )
    scheduler = Scheduler(config)
    scheduler.adopt(prefixes)
    told: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()
    store = PageStore(mover, memory_frames, file=file, keys=keys, fingerprint=b"tiny")
    store.report_to(
        lambda number, pages: told.put(("stored", number, pages)),
        lambda number, pages: told.put(("loaded", number, pages)),
    )
    return Process(runner, scheduler, store, told)


def ask(name: str, prompt: list[int]) -> Request:
    return request(name, prompt, SamplingParams(temperature=0.0, max_new_tokens=12))


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """What the conversation gives where nothing was ever cached."""
    process = begin(None)
    tokens = process.serve(ask("alone", CONVERSATION))
    process.end()
    return tokens


@pytest.fixture
def process() -> Iterator[Process]:
    made = begin(None)
    yield made
    made.end()


def test_what_comes_back_after_an_eviction_gives_the_same_tokens(
    process: Process, expected: list[int]
) -> None:
    assert process.serve(ask("first", CONVERSATION)) == expected
    process.copy_all()
    process.serve(ask("others", OTHERS))
    before = process.computed
    assert process.serve(again := ask("again", CONVERSATION)) == expected
    assert process.scheduler.counters.loaded_tokens > 60
    assert again.cached_tokens == 116
    assert process.computed - before == 4


@pytest.mark.parametrize("memory_frames", [1000, 3])
def test_the_next_process_gives_the_same_tokens_and_computes_few(
    tmp_path: Path, expected: list[int], memory_frames: int
) -> None:
    first = begin(tmp_path / "kv", memory_frames)
    assert first.serve(ask("first", CONVERSATION)) == expected
    first.copy_all()
    first.end()
    second = begin(tmp_path / "kv", memory_frames)
    assert second.serve(ask("again", CONVERSATION)) == expected
    assert second.computed == 4
    # And goes on where it was.
    turn = [*CONVERSATION, *expected, 3, 4, 5]
    tokens = second.serve(ask("more", turn))
    assert second.computed <= 4 + 7
    second.end()
    third = begin(None)
    assert third.serve(ask("alone", turn)) == tokens
    third.end()
