"""Compiles the CPU kernels beside whatever else a first start has to do. Needs no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ops.cpu import build

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from runtime.config import RunnerConfig

# Of NVIDIA's and AMD's drivers: where one is there, a GPU is likely to be the device.
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")


@contextmanager
def compiling_kernels(
    config: RunnerConfig, progress: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """In the block a process of its own compiles the kernels, where they will be wanted and are not
    there. Yields what waits for its end; the end of the block ends it.

    Whoever loads the kernels later finds them, or makes them, or says why they cannot be had: what
    goes wrong here is not told.
    """
    if not _wanted(config):
        yield lambda: None
        return
    process = subprocess.Popen(
        # By its path, since -m would look for it in the working folder first.
        [sys.executable, "-P", build.__file__, str(config.cache_folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # so that its compilers can be ended with it
    )
    assert process.stdout is not None
    reader = threading.Thread(target=_forward, args=(process.stdout, progress), daemon=True)
    reader.start()
    try:
        yield reader.join
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join()
        process.stdout.close()


def _wanted(config: RunnerConfig) -> bool:
    if config.device == "cuda" or config.cpu_kernels == "torch":
        return False
    if config.device == "auto" and any(Path(file).exists() for file in _GPU_FILES):
        return False
    try:
        return not build.is_built(build.choose_path(), config.cache_folder)
    except build.KernelBuildError:
        return False


def _forward(lines: IO[str], progress: Callable[[str], None]) -> None:
    for line in lines:
        progress(line.rstrip("\n"))
