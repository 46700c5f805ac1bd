"""The routers that people put in front of engines, from PyPI, in an environment of their own."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import pytest

PINNED = ("sglang-router==0.3.2", "vllm-router==0.1.17")


@functools.cache
def router_bin() -> Path:
    """The folder of their commands; skips where the package index cannot be reached."""
    folder = Path(tempfile.gettempdir()) / "loomserve-test-routers" / "-".join(PINNED)
    done = folder / "installed"
    if not done.exists():
        venv.create(folder, with_pip=False, clear=True)
        python = folder / "bin" / "python"
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", *PINNED]
        made = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if made.returncode:
            last = made.stderr.strip().splitlines()[-1:]
            pytest.skip(f"the routers cannot be installed from the package index: {last}")
        done.touch()
    return folder / "bin"
