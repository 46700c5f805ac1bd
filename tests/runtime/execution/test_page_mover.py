"""Pages of KV to host memory and back: the same bytes, and nobody waits but who calls."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from ops.gpu.op_set import GpuOps
from ops.kv_codes import CODE_DTYPES
from ops.reference import ReferenceOps
from runtime.execution.device import Device
from runtime.execution.page_mover import PageMover
from tests.ops.gpu.tiny_decoder import PAGE_SIZE, make_device, make_runner
from tests.runtime.execution.queued_gpu import ANSWER, DEVICE, FakeGpu


@pytest.mark.parametrize("kv_codes", [None, *CODE_DTYPES.values()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_come_back_as_they_were_wherever_they_go(
    dtype: torch.dtype, kv_codes: torch.dtype | None
) -> None:
    """Of codes with their scales, which are tensors of their own."""
    runner = make_runner(replace(make_device(ReferenceOps()), dtype=dtype, kv_codes=kv_codes))
    pool = runner.memory.pool
    generator = torch.Generator().manual_seed(1)
    for tensor in pool.tensors():
        tensor.copy_(30 * torch.randn(tensor.shape, generator=generator))
    before = [tensor.clone() for tensor in pool.tensors()]
    mover = PageMover(runner.device, pool, PAGE_SIZE)
    kv = mover.read([7, 3, 100])
    assert kv.shape == (3, mover.page_bytes)
    per_token = sum(tensor[0].numel() * tensor.element_size() for tensor in pool.tensors())
    assert mover.page_bytes == PAGE_SIZE * per_token
    mover.write([20, 21, 7], kv)
    for tensor, old in zip(pool.tensors(), before, strict=True):
        pages = tensor.view(torch.uint8).view(len(tensor) // PAGE_SIZE, -1)
        old = old.view(torch.uint8).view(len(tensor) // PAGE_SIZE, -1)
        assert torch.equal(pages[[20, 21, 7]], old[[7, 3, 100]])
        others = [page for page in range(len(pages)) if page not in (20, 21, 7)]
        assert torch.equal(pages[others], old[others])
    runner.close()


def test_on_a_gpu_pages_move_on_a_stream_of_their_own_through_pinned_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`FakeGpu` refuses the default stream, memory that is not pinned, and whoever waits for the
    device in the midst of queueing."""
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    plain = make_device(GpuOps(), str(DEVICE))
    device = replace(plain, queued=True, pinned=True)
    assert isinstance(device, Device)
    runner = make_runner(device)
    with gpu.watched():
        mover = PageMover(device, runner.memory.pool, PAGE_SIZE)
        gpu.strict = True
        found: list[np.ndarray] = []
        reading = threading.Thread(target=lambda: found.append(mover.read([5, 9])))
        reading.start()
        gpu.wait_for_queued("record", 1)
        assert not found, "nothing is read before the device has done it"
        gpu.run()
        reading.join(timeout=30)
        assert (found[0].view(np.int64) == ANSWER).all()
        assert gpu.commands.count("copy out") == len(runner.memory.pool.tensors())
        writing = threading.Thread(target=lambda: mover.write([6, 8], found[0]))
        writing.start()
        gpu.wait_for_queued("record", 2)
        assert writing.is_alive()
        gpu.run()
        writing.join(timeout=30)
        assert not writing.is_alive()
    gpu.strict = False
    runner.close()
