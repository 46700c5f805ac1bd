"""What a step says of the device's time, on a clock that ticks with each mark in its queue."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from runtime.config import RunnerConfig, SchedulerConfig
from runtime.execution import device
from runtime.execution.build import build_runner
from runtime.request import SamplingParams
from runtime.scheduling.scheduler import Scheduler
from tests.runtime.execution.drivers import request
from tests.runtime.models.tiny_models import make_model, random_tokens


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
