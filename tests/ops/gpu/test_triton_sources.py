"""What the kernels are compiled from, as they are launched: told by the compiler's first form alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

AOT = Path(__file__).with_name("aot.py")

pytestmark = pytest.mark.slow  # the compiler is imported in a process of its own


@pytest.fixture(scope="module")
def sources() -> list[dict]:
    """One record per launch of steps of several sizes and alignments, all in float32."""
    done = subprocess.run(
        [sys.executable, AOT, "sources"],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_no_step_needs_a_kernel_compiled_that_another_step_did_not(sources: list[dict]) -> None:
    """A kernel that is specialized on a step's sizes, or on where its arrays begin in the one
    upload, would be compiled anew in the middle of serving."""
    by_step = defaultdict(list)
    for record in sources:
        by_step[tuple(record["step"])].append((record["kernel"], record["specialized_on"]))
    assert len(by_step) == 4
    first, *others = by_step.values()
    assert len({kernel for kernel, _ in first}) == 23
    for launches in others:
        assert launches == first


def test_products_of_float32_are_exact(sources: list[dict]) -> None:
    """tf32 keeps 10 of 23 bits."""
    assert [record["kernel"] for record in sources if record["tf32"]] == []
