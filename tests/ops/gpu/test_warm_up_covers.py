"""No kernel is compiled while requests are served: the warm-up has had each of them compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ops.gpu.op_set import GpuOps
from runtime.execution.warm_up import warm_up
from tests.ops.gpu.launches import recorded_launches
from tests.ops.gpu.tiny_decoder import make_device, make_runner, serve_all_ways


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_serving_needs_no_kernel_that_the_warm_up_has_not_run(dtype: torch.dtype) -> None:
    runner = make_runner(replace(make_device(GpuOps()), dtype=dtype))
    with recorded_launches() as launched:
        warm_up(runner)
        warmed = set(launched)
        assert {"_extend_kernel", "_split_kernel", "_merge_kernel"} <= {k.name for k in warmed}
        launched.clear()
        serve_all_ways(runner)
    runner.close()
    assert len(launched) > 500
    assert not set(launched) - warmed
    assert torch.all(runner.memory.next_tokens == 0)
