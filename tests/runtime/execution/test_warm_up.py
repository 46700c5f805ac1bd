"""The warm-up touches the reserved page alone."""

from __future__ import annotations

from dataclasses import replace

import torch

from ops.cpu.op_set import CpuOps
from runtime.config import RunnerConfig
from runtime.execution import build
from runtime.execution.warm_up import warm_up
from tests.ops.gpu.tiny_decoder import PAGE_SIZE, make_device, make_queued_device, make_runner


def test_warm_up_writes_nothing_that_a_request_owns() -> None:
    runner = make_runner(make_device(CpuOps()))
    runner.memory.next_tokens[1:] = 7
    warm_up(runner)
    for pool in runner.memory.pool.tensors():
        assert torch.any(pool[:PAGE_SIZE])
        assert not torch.any(pool[PAGE_SIZE:])
    assert not torch.any(runner.memory.block_table.pages)
    assert runner.memory.next_tokens[1:].tolist() == [7] * 8
    runner.close()


def test_kernels_are_run_one_by_one_before_there_are_graphs(monkeypatch) -> None:
    """Which would take the warm-up's steps, and leave kernels of eager ones to be compiled late."""
    done: list[object] = []
    monkeypatch.setattr(build, "warm_up", lambda runner: done.append((runner.graphs, "warm-up")))
    monkeypatch.setattr(build, "_capture_graphs", lambda *_: done.append("capture"))
    runner = make_runner(replace(make_queued_device(CpuOps()), graphs=True))
    build._prepare(runner, RunnerConfig(), lambda _: None)
    runner.close()
    assert done == [(None, "warm-up"), "capture"]
