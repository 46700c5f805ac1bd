"""How often Triton has had to compile a kernel, or load one that it found compiled on disk.

Each time is a stall, of seconds or of milliseconds, that belongs before the first request.
"""

from __future__ import annotations

from typing import Any

from triton import knobs


class KernelCounter:
    """Counts from now on. Triton has one place for a hook, so one counter at a time counts."""

    def __init__(self) -> None:
        self._count = 0
        knobs.runtime.jit_post_compile_hook = self._compiled

    def __call__(self) -> int:
        return self._count

    def _compiled(self, **_: Any) -> None:
        self._count += 1
