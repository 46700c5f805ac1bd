"""The operations a model step is made of, by backend. Only here is a backend chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ops.op_set import OpSet


def load(backend: str) -> OpSet:
    """The op set of a backend: "reference", "cpu" or "gpu".

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
