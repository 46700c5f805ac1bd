"""The kernels run in Triton's interpreter here, on CPU tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import triton

from scripts._triton_interpreter import patch_loop_bounds

if TYPE_CHECKING:
    from collections.abc import Iterator

patch_loop_bounds()


@pytest.fixture(autouse=True)
def interpreted() -> None:
    assert triton.knobs.runtime.interpret, "tests/conftest.py must set TRITON_INTERPRET=1"


@pytest.fixture
def nan_filled_outputs() -> Iterator[None]:
    """torch.empty gives NaN, so that an element which a kernel forgets to write is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
