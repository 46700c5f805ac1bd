"""Chooses the CPU's op set: native kernels where they can be built, plain torch elsewhere."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ops.cpu import build
from ops.cpu.library import Library
from ops.cpu.native import NativeOps
from ops.cpu.op_set import CpuOps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)

KERNELS = ("auto", "native", "torch")


@dataclass(frozen=True, slots=True)
class CpuOptions:
    """How the CPU's operations run.

    Args:
        cache_dir: where compiled kernels are kept.
        kernels: "native" kernels, plain "torch", or "auto": native where they can be built.
        threads: of the native kernels; 0: one per core that may be used.
        pinning: bind the kernels' threads to cores.
        path: an instruction path of `build.INSTRUCTION_PATHS`; None: the best of this CPU.
    """

    cache_dir: Path
    kernels: str = "auto"
    threads: int = 0
    pinning: bool = False
    path: str | None = None


def load_cpu_ops(
    options: CpuOptions, progress: Callable[[str], None] = log.info
) -> tuple[CpuOps, str]:
    """The op set and, in words, what it runs on and why.

    Raises:
        ValueError: no such kind of kernels.
        build.KernelBuildError: native kernels were asked for and cannot be had.
    """
    if options.kernels not in KERNELS:
        raise ValueError(f"kernels {options.kernels!r}: expected one of {', '.join(KERNELS)}")
    if options.kernels == "torch":
        return CpuOps(), "torch, as asked for"
    try:
        path = build.choose_path(options.path)
        file = build.build_library(path, options.cache_dir, progress)
    except build.KernelBuildError as error:
        if options.kernels == "native":
            raise
        reason, _, details = str(error).partition("\n")
        log.warning("no native CPU kernels, plain torch serves: %s", reason)
        log.debug("%s", details)
        return CpuOps(), f"torch: {reason}"
    if options.path is None and build.tiles_refused():
        log.warning("this CPU has AMX, but the system does not let this process use it")
    library = Library(file, options.threads, options.pinning)
    return NativeOps(library), f"native {path}, {library.threads} threads"
