"""Kernels that are compiled late are noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_each_compilation_is_counted_once(tmp_path: Path) -> None:
    """Also one whose result is found on disk: the second process compiles nothing, but loads."""
    script = Path(__file__).with_name("compile_once.py")
    root = str(Path(__file__).parents[3])
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": root}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, script], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == ["[0,", "1,", "1,", "1,", "2]"]
