"""What a step says of the device's time, on a clock that ticks with each mark in its queue."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from ops.cpu.op_set import CpuOps
from runtime.config import RunnerConfig, SchedulerConfig
from runtime.execution import device
from runtime.execution.build import build_runner
from runtime.execution.device import Device, Fence
from runtime.request import SamplingParams
from runtime.scheduling.scheduler import Scheduler
from tests.ops.gpu.tiny_decoder import make_device, make_runner
from tests.runtime.execution.drivers import request
from tests.runtime.models.tiny_models import make_model, random_tokens


class QueuedDevice(Device):
    """Work is queued, as far as the order of calls goes."""

    def stream(self) -> None:
        return None

    def fence(self) -> Fence:
        return make_device(CpuOps()).fence()


def test_a_queued_device_is_not_charged_for_what_the_host_prepares(monkeypatch):
    """The marks are the step's four, and one behind each upload of the staging."""
    plain = make_device(CpuOps())
    fields = {name: getattr(plain, name) for name in Device.__slots__}
    runner = make_runner(QueuedDevice(**fields | {"queued": True}))
    ticks = itertools.count()
    monkeypatch.setattr(device, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    scheduler = Scheduler(SchedulerConfig(capacity_tokens=512, context_length=256, page_size=4))
    params = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
    scheduler.add(request("a", random_tokens(9, seed=1), params), 0.0)
    batch = scheduler.plan(0.0).batch
    assert batch is not None
    step = runner.launch(batch)
    step.sample(None)
    assert step.result().device_s == 2.0  # one tick of forward pass, one of sampling
    runner.close()


def test_who_waits_for_an_event_leaves_the_core_to_others(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: asked.append(options))
    plain = make_device(CpuOps())
    fields = {name: getattr(plain, name) for name in Device.__slots__}
    Device(**fields | {"queued": True}).fence()
    assert asked == [{"enable_timing": True, "blocking": True}]


def test_a_step_tells_how_long_the_device_stood_still_before_it(tmp_path, monkeypatch):
    make_model(tmp_path, "llama", scale=0.12)
    config = RunnerConfig(
        model=str(tmp_path),
        device="cpu",
        dtype="float32",
        max_total_tokens=1024,
        cpu_kernels="torch",
        cpu_threads=1,
    )
    runner, _ = build_runner(config, page_size=4, max_running_requests=8)
    scheduler = Scheduler(SchedulerConfig(capacity_tokens=1024, context_length=512, page_size=4))
    params = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
    scheduler.add(request("a", random_tokens(9, seed=1), params), 0.0)
    ticks = itertools.count()
    monkeypatch.setattr(device, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    runner.last_end = None  # of the steps that warmed it up
    outputs = []
    for moment in range(4):
        batch = scheduler.plan(float(moment)).batch
        assert batch is not None
        step = runner.launch(batch)
        step.sample(None)
        outputs.append(step.result())
        scheduler.commit(batch, outputs[-1], float(moment))
        if moment == 1:
            next(ticks)  # the host takes its time
            next(ticks)
    runner.close()
    # Four marks a step: one tick of forward pass, one between, one of sampling.
    assert [one.device_s for one in outputs] == [2.0] * 4
    assert [one.idle_s for one in outputs] == pytest.approx([0.0, 1.0, 3.0, 1.0])
