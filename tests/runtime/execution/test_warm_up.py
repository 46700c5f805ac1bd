"""The warm-up touches the reserved page alone."""

from __future__ import annotations

import torch

from ops.cpu.op_set import CpuOps
from runtime.execution.warm_up import warm_up
from tests.ops.gpu.tiny_decoder import PAGE_SIZE, make_device, make_runner


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
