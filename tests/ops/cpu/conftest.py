"""The native op set on every instruction path that this machine has."""

from __future__ import annotations

import functools
import os

import pytest

from ops.cpu import build
from ops.cpu.library import Library
from ops.cpu.native import NativeOps

# What `test_native_sanitizers.py` sets to run these tests on instrumented kernels.
EXTRA_FLAGS = tuple(os.environ.get("LOOMSERVE_TEST_KERNEL_FLAGS", "").split())


@functools.cache
def open_ops(path: str, threads: int = 2) -> NativeOps:
    library = build.build_library(path, build.default_cache_dir(), print, EXTRA_FLAGS)
    return NativeOps(Library(library, threads))


@pytest.fixture(scope="session", params=build.available_paths() or ["none"])
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
