"""Launches a kernel as if a GPU were there: it is compiled, and not run. Prints what the counter says
after each launch.

Run as a script, since Triton interprets or compiles for the life of a process.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "0"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from ops.gpu.compilations import KernelCounter
from ops.gpu.sampling import _ban_kernel


class Driver:
    """Of an H100 that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def main() -> None:
    driver.set_active(Driver())
    ids = torch.zeros(9, dtype=torch.int64)
    counter = KernelCounter()
    counts = [counter()]
    # The same again; other addresses of a step's upload; another vocabulary.
    for rows, stride in ((ids, 7), (ids, 7), (ids[1:], 7), (ids, 64)):
        _ban_kernel.warmup(torch.zeros(2, 64), rows, rows, stride, grid=(1,), num_warps=1)
        counts.append(counter())
    print(counts)


if __name__ == "__main__":
    main()
