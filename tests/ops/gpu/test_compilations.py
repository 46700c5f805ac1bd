"""Kernels that are compiled late are noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


pytestmark = pytest.mark.slow  # Triton is imported in a process of its own


def output_of(script: str, cache: Path) -> str:
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(script)],
        env=os.environ | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_compilation_is_counted_once(tmp_path: Path) -> None:
    """Also one whose result is found on disk: the second process compiles nothing, but loads."""
    for _ in range(2):
        assert json.loads(output_of("compile_once.py", tmp_path)) == [0, 1, 1, 1, 2]


def test_serving_compiles_nothing_that_warm_up_and_capture_have_not(tmp_path: Path) -> None:
    """As Triton decides it: by constants, types, alignments and values of all arguments. Replayed
    and eager steps take turns, and every way to sample."""
    found = json.loads(output_of("serve_without_compiling.py", tmp_path))
    # All there are, but for those of pools of codes and what `_place_heads_kernel` does at once.
    assert len(found["before"]) == 16, found["before"]
    assert (found["later"], found["noticed"]) == ([], 0)
    paths = ("_replayed_logits", "_replayed_mixed_logits", "_eager_logits")
    assert min(found["paths"][name] for name in paths) >= 5
