"""The order in which steps reach a device that queues work, and who waits for what.

The device is `FakeGpu`: what goes wrong on a GPU now and then goes wrong there every time.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ops.gpu.op_set import GpuOps
from runtime.execution.device import Device
from runtime.execution.forward_batch import Staging
from runtime.execution.model_runner import ModelRunner, ModelStep
from runtime.request import SamplingParams
from runtime.runner import SampleMasks
from tests.ops.gpu.tiny_decoder import VOCAB_SIZE, make_device, make_runner
from tests.runtime.execution.queued_gpu import ANSWER, DEVICE, FakeGpu, Misuse
from tests.runtime.execution.test_forward_batch import random_batch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runtime.runner import LaunchedStep
    from runtime.scheduling.schedule_batch import ScheduleBatch

EVERYTHING = SamplingParams(
    temperature=0.8,
    top_p=0.9,
    seed=-3,
    repetition_penalty=1.1,
    logit_bias=((5, 1.0), (9, -2.0)),
    min_tokens=4,
    stop_token_ids=frozenset({7}),
    logprobs=3,
    prompt_logprobs=2,
)


class QueuedDevice(Device):
    """What asks a GPU for values is answered."""

    def probe(self) -> None:
        return


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    fake.install(monkeypatch)
    return fake


@pytest.fixture
def device() -> Device:
    plain = replace(make_device(GpuOps(), str(DEVICE)), queued=True, pinned=True)
    return QueuedDevice(**{name: getattr(plain, name) for name in Device.__slots__})


@pytest.fixture
def runner(gpu: FakeGpu, device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelRunner]:
    monkeypatch.setattr(ModelStep, "quick", True)  # queued by the caller, so the order is known
    runner = make_runner(device)
    assert gpu.commands == ["wait_stream"], "what was set up before comes first"
    gpu.strict = True
    with gpu.watched():
        yield runner
    gpu.run()
    runner.close()


def batch_of(kind: str, sampling: SamplingParams | None = None, *, seed: int = 0) -> ScheduleBatch:
    batch = random_batch(random.Random(seed), kind)
    if sampling is not None:
        for request in batch.requests:
            request.sampling = sampling
    return batch


def tokens_of(step: LaunchedStep, batch: ScheduleBatch) -> None:
    assert step.result().token_ids == [ANSWER] * len(batch.sampled)


@pytest.mark.parametrize("sampling", [None, EVERYTHING], ids=["greedy", "everything"])
@pytest.mark.parametrize("kind", ["prefill", "mixed", "decode"])
def test_a_step_is_queued_whole_and_read_when_the_device_is_done(
    kind: str, sampling: SamplingParams | None, gpu: FakeGpu, runner: ModelRunner
) -> None:
    batch = batch_of(kind, sampling)
    masks = None
    if sampling is not None:
        masks = SampleMasks([0], np.full((1, (VOCAB_SIZE + 31) // 32), -1, dtype=np.int32))
    step = runner.launch(batch)
    step.sample(masks)
    assert not step.done
    gpu.run()
    tokens_of(step, batch)
    assert gpu.commands[-1] == "record", "the fence comes last"


def test_three_steps_overlap_and_nobody_who_queues_them_waits(
    gpu: FakeGpu, runner: ModelRunner
) -> None:
    """As the loop does: step N + 1 is launched before N is read, and samples after that."""
    batches = [batch_of(kind, seed=seed) for seed, kind in enumerate(("mixed", "decode", "mixed"))]
    steps = [runner.launch(batches[0])]
    steps[0].sample(None)
    for later in batches[1:]:
        end = len(gpu.commands)
        steps.append(runner.launch(later))
        assert not steps[-2].done
        gpu.run(end)
        tokens_of(steps[-2], batches[len(steps) - 2])
        steps[-1].sample(None)
    gpu.run()
    tokens_of(steps[-1], batches[-1])


def test_a_set_of_staging_is_written_again_only_when_its_copy_is_done(
    gpu: FakeGpu, device: Device
) -> None:
    """Two steps go without a wait. The third waits for the copies of the first, and no longer."""
    staging = Staging(device)
    gpu.patient = True
    stream = device.stream()
    with device.on(stream):
        for _ in range(5):
            staging.upload([np.arange(7, dtype=np.int32)])
    copies = [i for i, command in enumerate(gpu.commands) if command == "copy in"]
    records = [i for i, command in enumerate(gpu.commands) if command == "record"]
    assert all(copy < record for copy, record in zip(copies, records, strict=True))
    assert gpu.waits == records[:3]


@pytest.mark.parametrize("part", ["forward", "sample"])
def test_a_step_that_cannot_be_queued_fails_alone_wherever_it_stops(
    part: str, gpu: FakeGpu, runner: ModelRunner
) -> None:
    """At every 13th command of a step: it and the step behind it fail, the one before it does
    not, nobody waits for ever, and afterwards steps run again."""
    batch = batch_of("mixed", EVERYTHING)
    for _ in range(2):  # tables grow in the first
        first = len(gpu.commands)
        step = runner.launch(batch)
        middle = len(gpu.commands)
        step.sample(None)
        forward, sample = middle - first, len(gpu.commands) - middle
        gpu.run()
        tokens_of(step, batch)
    for at in range(0, forward if part == "forward" else sample, 13):
        before = runner.launch(batch)
        before.sample(None)
        gpu.fails_at = len(gpu.commands) + (at if part == "forward" else forward + at)
        broken, behind = runner.launch(batch), None
        if not broken.done:
            broken.sample(None)
        behind = runner.launch(batch)
        behind.sample(None)
        with pytest.raises(RuntimeError, match="cannot be queued"):
            broken.result()
        with pytest.raises(RuntimeError, match="a step before it has failed"):
            behind.result()
        gpu.fails_at = None
        gpu.run()
        tokens_of(before, batch)
        runner.probe()
        again = runner.launch(batch)
        again.sample(None)
        gpu.run()
        tokens_of(again, batch)


def test_the_fake_finds_what_it_is_for(gpu: FakeGpu, device: Device) -> None:
    import torch

    pageable, pinned = torch.ones(3), torch.empty(3, pin_memory=True)
    stream, event = device.stream(), torch.cuda.Event()
    with device.on(stream):
        with pytest.raises(Misuse, match="copy to the device"):
            pageable.to(DEVICE, non_blocking=True)
        with pytest.raises(Misuse, match="copy to the device"):
            pinned.to(DEVICE)
        there = pinned.to(DEVICE, non_blocking=True)
        with pytest.raises(Misuse, match="may not have read"):
            pinned.to(DEVICE, non_blocking=True)
        with pytest.raises(Misuse, match="copy to the host"):
            pageable.copy_(there, non_blocking=True)
        with pytest.raises(Misuse, match="waits for a value"):
            there.sum().item()
        event.record()
        with pytest.raises(Misuse, match="who queues work waits"):
            event.synchronize()
    gpu.strict = True
    with gpu.watched(), pytest.raises(Misuse, match="default stream"):
        there + there
