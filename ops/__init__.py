"""The operations a model step is made of, by backend. Only here is a backend chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ops.cpu.load import CpuOptions
    from ops.decoder import Backend


def load_cpu(options: CpuOptions, progress: Callable[[str], None]) -> tuple[Backend, str]:
    """The CPU's op set as the options ask for, and in words what it runs on and why.

    Args:
        progress: told what is being compiled, where something is.
    Raises:
        ops.cpu.build.KernelBuildError: native kernels were asked for and cannot be had.
    """
    from ops.cpu.load import load_cpu_ops

    return load_cpu_ops(options, progress)


def gpu_kernel_counter() -> Callable[[], int]:
    """What tells how many GPU kernels have been compiled, or loaded, from now on."""
    from ops.gpu.compilations import KernelCounter

    return KernelCounter()


def load(backend: str) -> Backend:
    """The op set of a backend: "reference", "cpu" (plain torch; see `load_cpu`) or "gpu".

    Raises:
        ValueError: there is no such backend.
    """
    if backend == "reference":
        from ops.reference import ReferenceOps

        return ReferenceOps()
    if backend == "cpu":
        from ops.cpu.op_set import CpuOps

        return CpuOps()
    if backend == "gpu":
        from ops.gpu.op_set import GpuOps

        return GpuOps()
    raise ValueError(f"ops backend {backend!r}: expected reference, cpu or gpu")
