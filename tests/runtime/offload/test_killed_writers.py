"""What processes leave that are killed while they write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
KILLS = 200


@pytest.mark.slow
def test_nothing_wrong_is_served_after_a_kill_at_any_moment(tmp_path: Path) -> None:
    script = Path(__file__).with_name("killed_writers.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "kv"), str(KILLS), "7"],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    words = done.stdout.split()
    assert words[:2] == [str(KILLS), "kills,"]
    assert int(words[2]) > 5 * KILLS, "hardly a page was there to look at"
