"""What this machine's memory and arithmetic can do at best, measured with torch."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from runtime.examination import Machine

if TYPE_CHECKING:
    from collections.abc import Callable


def torch_has_bfloat16() -> bool:
    """Whether torch's bfloat16 products are faster than its float32 ones, not only possible."""
    flags = (torch.cpu._is_avx512_bf16_supported, torch.cpu._is_amx_tile_supported)
    return any(flag() for flag in flags)


def measure_machine(repeats: int = 20, path: str | None = None) -> Machine:
    """About five seconds with twenty repeats; meant for an idle machine, so the best of them
    counts. torch's threads should be as many as the kernels'.

    Args:
        path: an instruction path of the kernels. For those of AVX2 and of AVX-512 the arithmetic is
            measured with no more, if torch has multiplied nothing yet in this process.
    """
    narrow = path is not None and path.startswith("avx2")
    if narrow:
        os.environ.setdefault("MKL_ENABLE_INSTRUCTIONS", "AVX2")
    elif path is not None and path.startswith("avx512"):
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # without AMX
    values = torch.randint(0, 100, (1 << 26,), dtype=torch.int64)  # 512 MB, beyond any cache
    bandwidth = values.nbytes / best_seconds(lambda: values.max(), repeats)
    dtype = torch.bfloat16 if torch_has_bfloat16() and not narrow else torch.float32
    peaks = []
    for size in (1024, 2048):
        left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
        peaks.append(2 * size**3 / best_seconds(partial(torch.matmul, left, right), repeats))
    return Machine(bandwidth, max(peaks))


def best_seconds(function: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)
