"""Both forms of launching, the CPU's and the one for a device that queues work, on a CPU."""

from __future__ import annotations

import contextlib
import threading
from array import array
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

import runtime.execution.model_runner as model_runner
from runtime.config import RunnerConfig, SchedulerConfig
from runtime.execution.build import build_runner
from runtime.execution.device import Device
from runtime.execution.forward_batch import decode_step
from runtime.execution.launchers import StreamLauncher, ThreadLauncher
from runtime.execution.model_runner import ModelRunner, ModelStep
from runtime.execution.unplanned_step import unplanned_step
from runtime.request import SamplingParams
from runtime.runner import SampleMasks, StepOutput
from runtime.scheduling.schedule_batch import ScheduleBatch
from runtime.scheduling.scheduler import Scheduler
from tests.runtime.execution.drivers import request, run
from tests.runtime.models.tiny_models import make_model, random_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    folder = tmp_path_factory.mktemp("tiny")
    make_model(folder, "llama", scale=0.12)
    config = RunnerConfig(
        model=str(folder), device="cpu", max_total_tokens=512, cpu_kernels="torch", cpu_threads=1
    )
    runner, _ = build_runner(config, page_size=4, max_running_requests=4)
    yield runner
    runner.close()


@pytest.fixture(params=[ThreadLauncher, StreamLauncher])
def runner(
    built: ModelRunner, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModelRunner]:
    """The tiny model under each launcher. A CPU queues nothing, so every fence is reached at once:
    what is tested is the order of calls and who waits for what."""
    if request.param is StreamLauncher:
        monkeypatch.setattr(model_runner, "ThreadLauncher", lambda: StreamLauncher(built.device))
    runner = ModelRunner(built.device, built.decoder, built.sizes)
    assert isinstance(runner._launcher, request.param)
    yield runner
    runner.close()


def prefill(row: int = 1, tokens: int = 6) -> ScheduleBatch:
    ids = random_tokens(tokens, seed=row)
    pages = -(-tokens // 4)
    batch = unplanned_step([request(f"r{row}", ids, GREEDY)], [row], [0], ids)
    batch.table_rows = array("i", [row] * pages)
    batch.table_indices = array("i", range(pages))
    batch.table_pages = array("i", [10 * row + i for i in range(pages)])
    return batch


def test_generation_is_the_same(runner: ModelRunner, built: ModelRunner) -> None:
    def generate(with_runner: ModelRunner, overlap: bool) -> list[list[int]]:
        config = SchedulerConfig(
            capacity_tokens=512,
            context_length=512,
            page_size=4,
            chunked_prefill_size=16,
            max_running_requests=4,
        )
        requests = [request(f"{i}", random_tokens(20 + i, seed=i), GREEDY) for i in range(6)]
        result = run(Scheduler(config), with_runner, requests, overlap=overlap)
        return [generated.token_ids for generated in result.outputs.values()]

    assert generate(runner, overlap=True) == generate(built, overlap=False)


def test_a_step_is_done_only_after_it_may_sample(runner: ModelRunner) -> None:
    called = threading.Event()
    pending = runner.launch(prefill())
    pending.add_done_callback(called.set)
    assert not pending.done
    assert not called.is_set()
    pending.sample(None)
    output = pending.result()
    assert len(output.token_ids) == 1
    assert output.device_s > 0
    assert called.wait(10)
    late = threading.Event()
    pending.add_done_callback(late.set)
    assert late.wait(10)


def test_steps_end_in_the_order_of_their_launch(runner: ModelRunner) -> None:
    ended: list[int] = []
    steps = []
    for row in (1, 2, 3):
        pending = runner.launch(prefill(row))
        pending.add_done_callback(partial(ended.append, row))
        steps.append(pending)
    for pending in steps:
        pending.sample(None)
    runner.close()
    assert ended == [1, 2, 3]


@pytest.mark.parametrize("part", ["forward", "sample", "output"])
def test_a_step_that_raises_fails_with_those_behind_it(
    runner: ModelRunner, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(ModelStep, part)
    broken = [True]

    def once(*arguments: Any) -> Any:
        if broken:
            broken.clear()
            raise RuntimeError(f"{part} broke")
        return original(*arguments)

    monkeypatch.setattr(ModelStep, part, once)
    first = runner.launch(prefill(1))
    if part != "forward":
        first.sample(None)
    second = runner.launch(prefill(2))
    if part == "forward":
        first.sample(None)
    second.sample(None)
    with pytest.raises(RuntimeError, match=f"{part} broke"):
        first.result()
    if part != "output":  # that of the first may raise when the second has already run
        with pytest.raises(RuntimeError, match="a step before it has failed"):
            second.result()
    else:
        with contextlib.suppress(RuntimeError):
            second.result()
    runner.probe()
    third = runner.launch(prefill(3))
    third.sample(None)
    assert len(third.result().token_ids) == 1


def test_a_step_that_cannot_begin_fails_none_before_it(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = Device.fence, iter(range(8))  # of two steps

    def fence(device: Device) -> Any:
        if next(made, None) is None:
            raise RuntimeError("no fence is left")
        return make(device)

    monkeypatch.setattr(Device, "fence", fence)
    steps = []
    for row in (1, 2, 3):
        steps.append(runner.launch(prefill(row)))
        if isinstance(runner._launcher, StreamLauncher):
            steps[-1].sample(None)
    # On a thread, the second has waited behind the first when the third could not begin.
    for step in steps:
        if not step.may_sample:
            step.sample(None)
    assert [len(step.result().token_ids) for step in steps[:2]] == [1, 1]
    with pytest.raises(RuntimeError, match="no fence is left"):
        steps[2].result()
    monkeypatch.undo()
    runner.probe()


def test_close_waits_for_what_may_sample_and_is_idempotent(runner: ModelRunner) -> None:
    pending = runner.launch(prefill())
    pending.sample(None)
    runner.close()
    assert pending.done
    runner.close()


def test_close_gives_up_steps_that_may_never_sample(runner: ModelRunner) -> None:
    pending = [runner.launch(prefill(row)) for row in (1, 2, 3)]
    pending[0].sample(None)
    runner.close()
    assert len(pending[0].result().token_ids) == 1
    for step in pending[1:]:
        assert step.done, "nobody waits for it for ever"
        with pytest.raises(RuntimeError, match="closed before"):
            step.result()


class Work:
    """Notes on which thread each part is done; `forward` waits until it may go on."""

    def __init__(self, name: str, done: list[tuple[str, str]], *, quick: bool) -> None:
        self.quick = quick
        self.may_go_on = threading.Event()
        if quick:
            self.may_go_on.set()
        self._name = name
        self._done = done

    def forward(self) -> None:
        assert self.may_go_on.wait(10)
        self._done.append((self._name, threading.current_thread().name))

    def sample(self, masks: SampleMasks | None) -> None:
        self._done.append((f"{self._name} samples", threading.current_thread().name))

    def output(self) -> StepOutput:
        return StepOutput([])


class Broken(Work):
    def forward(self) -> None:
        raise ZeroDivisionError


def test_a_captured_step_is_queued_by_the_caller_and_another_beside_it(
    built: ModelRunner,
) -> None:
    """In the order of the calls: what comes behind a step that takes long waits for it, and the
    caller does not."""
    launcher = StreamLauncher(built.device)
    done: list[tuple[str, str]] = []
    first, long, behind = (
        Work("first", done, quick=True),
        Work("long", done, quick=False),
        Work("behind", done, quick=True),
    )
    steps = []
    for work in (first, long, behind):
        steps.append(launcher.launch(work))
        steps[-1].sample(None)
    caller = threading.current_thread().name
    assert done == [("first", caller), ("first samples", caller)]
    steps[0].result()
    assert not steps[1].done
    long.may_go_on.set()
    assert steps[2].result().token_ids == []
    beside = "model-launcher"
    assert done[2:] == [
        (name, beside) for name in ("long", "long samples", "behind", "behind samples")
    ]
    assert min(step.queueing_s for step in steps) > 0
    launcher.close()


def test_a_step_that_cannot_be_queued_on_the_thread_fails_those_behind_it(
    built: ModelRunner,
) -> None:
    launcher = StreamLauncher(built.device)
    done: list[tuple[str, str]] = []
    works = [Broken("long", done, quick=False), Work("behind", done, quick=True)]
    steps = [launcher.launch(work) for work in works]
    for step in steps:
        step.sample(None)
    with pytest.raises(ZeroDivisionError):
        steps[0].result()
    with pytest.raises(RuntimeError, match="a step before it has failed"):
        steps[1].result()
    assert done == []
    launcher.close()


def test_steps_that_fail_and_are_never_sampled_are_not_kept(built: ModelRunner) -> None:
    launcher = StreamLauncher(built.device)
    done: list[tuple[str, str]] = []
    for _ in range(5):
        step = launcher.launch(Broken("long", done, quick=False))
        with pytest.raises(ZeroDivisionError):
            step.result()
        launcher.failed = False
    assert len(launcher._unsampled) == 1
    launcher.close()


def test_a_decode_step_from_device_tensors_alone_is_the_same_step(built: ModelRunner) -> None:
    """What graphs capture: the logits of rows and lengths, padding included, and no live slot
    is written beyond the step's own."""
    runner = ModelRunner(built.device, built.decoder, replace(built.sizes))
    for row, tokens in ((1, 6), (2, 7)):
        pending = runner.launch(prefill(row, tokens))
        pending.sample(None)
        pending.result()
    rows = torch.tensor([2, 1, 0, 0], dtype=torch.int32)
    kv_lens = torch.tensor([8, 7, 1, 1], dtype=torch.int32)
    with torch.inference_mode():
        step = decode_step(rows, kv_lens, runner.memory, 512)
        assert step.slots.tolist() == [21 * 4 + 3, 11 * 4 + 2, 0, 0]
        pools = runner.memory.pool.tensors()
        before = [pool.clone() for pool in pools]
        padded = runner.decode_logits(rows, kv_lens, 512)
        for pool, old in zip(pools, before, strict=True):
            changed = (pool != old).flatten(1).any(1).nonzero().flatten().tolist()
            assert set(changed) == {0, 11 * 4 + 2, 21 * 4 + 3}
        alone = runner.decode_logits(rows[:2], kv_lens[:2], 8)
    runner.close()
    torch.testing.assert_close(padded[:2], alone, atol=1e-5, rtol=1e-5)


def test_a_device_record_is_open_about_what_it_can(built: ModelRunner) -> None:
    device: Device = built.device
    assert (device.queued, device.pinned, device.graphs) == (False, False, False)
    assert device.memory_budget_bytes is None
    fences = device.fence(), device.fence()
    for fence in fences:
        fence.record()
        fence.synchronize()
    assert fences[1].seconds_since(fences[0]) >= 0
