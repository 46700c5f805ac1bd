"""What every test needs."""

from __future__ import annotations

import gc
import os

import pytest

from tests import effort

# Before anything imports triton, whose own library reads it at import: the GPU kernels' tests run
# them in Triton's interpreter. Compilation is tested in processes of its own.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
# Before anything imports torch: its tensors are tiny here, and to wake threads for them, which then
# spin for more, takes five times as long as the work.
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # imports leave no garbage, and each look for it takes longer than the one before
    effort.fast = config.option.markexpr == "not slow"


@pytest.hookimpl(trylast=True)  # when what is slow has gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if effort.fast:
        out = set(effort.left_out(items))
        config.hook.pytest_deselected(items=[item for item in items if item in out])
        items[:] = [item for item in items if item not in out]


def pytest_collection_finish() -> None:
    """What is imported by now stays to the end: no collection need look at it again, which is a
    fifth of the time of short tests."""
    gc.collect()
    gc.freeze()
    gc.enable()
