"""The native op set on every instruction path that this machine has."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import pytest

from ops.cpu import build
from ops.cpu.library import Library
from ops.cpu.native import NativeOps
from tests.cache import cache_folder

if TYPE_CHECKING:
    from pathlib import Path

# What `test_native_sanitizers.py` sets to run these tests on instrumented kernels.
EXTRA_FLAGS = tuple(os.environ.get("LOOMSERVE_TEST_KERNEL_FLAGS", "").split())


# What avx2_vnni runs, where only the 512-bit kind of these instructions is there: their 256-bit
# encoding.
NARROW_VNNI = "narrow_vnni"


def built(path: str, extra_flags: tuple[str, ...]) -> Path:
    """The library of a path, compiled with further flags."""
    if path == NARROW_VNNI:
        path, extra_flags = "avx512_vnni", (*extra_flags, "-DLOOM_YMM")
    return build.build_library(path, cache_folder(), print, extra_flags)


@functools.cache
def open_ops(path: str, threads: int = 2) -> NativeOps:
    return NativeOps(Library(built(path, EXTRA_FLAGS), threads))


def all_paths() -> list[str]:
    """The instruction paths that can be run here, the one that is served with first."""
    paths = build.available_paths()
    return [*paths, NARROW_VNNI] if "avx512_vnni" in paths else paths


def paths_to_test() -> list[Any]:
    """All that this machine has; those that it would not serve with take their time."""
    paths = all_paths() or ["none"]
    return [paths[0], *(pytest.param(path, marks=pytest.mark.slow) for path in paths[1:])]


@pytest.fixture(scope="session", params=paths_to_test())
def native(request: pytest.FixtureRequest) -> NativeOps:
    if request.param == "none":
        pytest.skip("this CPU has no native instruction path")
    return open_ops(request.param)


@pytest.fixture(scope="session")
def best() -> NativeOps:
    """The path that is served with."""
    if not build.available_paths():
        pytest.skip("this CPU has no native instruction path")
    return open_ops(build.available_paths()[0])
