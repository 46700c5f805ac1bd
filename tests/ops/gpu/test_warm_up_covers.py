"""No kernel is compiled while requests are served: the warm-up has had each of them compiled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ops.gpu.op_set import GpuOps
from runtime.config import SchedulerConfig
from runtime.execution.warm_up import warm_up
from runtime.runner import SampleMasks
from runtime.scheduling.schedule_batch import ScheduleBatch
from runtime.scheduling.scheduler import Scheduler
from tests.ops.gpu.launches import recorded_launches
from tests.ops.gpu.tiny_decoder import SAMPLINGS, VOCAB_SIZE, make_device, make_runner
from tests.runtime.execution.drivers import request, run


def first_row_masked(batch: ScheduleBatch) -> SampleMasks | None:
    words = np.full((1, (VOCAB_SIZE + 31) // 32), -1, dtype=np.int32)
    return SampleMasks([0], words) if len(batch.sampled) else None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_serving_needs_no_kernel_that_the_warm_up_has_not_run(dtype: torch.dtype) -> None:
    """Prompts longer and shorter than a tile, alone and beside decode rows, and every way to
    sample, one request at a time and all together."""
    runner = make_runner(replace(make_device(GpuOps()), dtype=dtype))
    with recorded_launches() as launched:
        warm_up(runner)
        warmed = set(launched)
        assert {"_extend_kernel", "_split_kernel", "_merge_kernel"} <= {k.name for k in warmed}
        launched.clear()
        for together in (False, True):
            requests = [
                request(f"r{i}", list(range(1, 7 + 12 * i)), replace(sampling, max_new_tokens=4))
                for i, sampling in enumerate(SAMPLINGS)
            ]
            for group in [requests] if together else [[item] for item in requests]:
                config = SchedulerConfig(
                    capacity_tokens=512,
                    context_length=256,
                    page_size=4,
                    max_running_requests=8,
                    chunked_prefill_size=40,
                )
                done = run(Scheduler(config), runner, group, masks=first_row_masked)
                assert done.failed_steps == 0
                if together:
                    assert done.steps["mixed"]
                    assert done.steps["decode"]
    runner.close()
    assert len(launched) > 500
    assert not set(launched) - warmed
    assert torch.all(runner.memory.next_tokens == 0)
