"""scripts/serve and scripts/test make their environment once, whole, and one at a time.

pip is replaced by one that only notes what it was asked for, so nothing is downloaded; the
virtual environments are real.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
FAKE_PIP = """
import os, sys
from pathlib import Path
if sys.argv[1:2] == ["install"]:
    with open(os.environ["PIP_CALLS"], "a") as log:
        log.write(" ".join(sys.argv[1:]) + "\\n")
    command = Path(sys.executable).parent / "loomserve"
    command.write_text('#!/bin/sh\\necho served in "$PWD": "$@"\\n')
    command.chmod(0o755)
    sys.exit(os.environ.get("NONE_OF") in sys.argv)
"""
INSTALL = "install --disable-pip-version-check -e"


class Checkout:
    """A folder with the scripts, as after a clone."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "scripts").mkdir()
        for name in ("serve", "test", "_environment.sh", "_environment.py"):
            shutil.copy(SCRIPTS / name, root / "scripts")
        (root / "pyproject.toml").write_text("[project]\n")
        (root / "scripts" / "constraints.txt").write_text("torch==2.13.0\n")
        pip = root / "fake" / "pip"
        pip.mkdir(parents=True)
        (pip / "__main__.py").write_text(FAKE_PIP)
        (pip / "__init__.py").write_text("")
        self.log = root / "pip-calls"
        self.log.write_text("")

    def start(self, script: str, *arguments: str, cwd: Path | None = None) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": str(self.root / "fake"), "PIP_CALLS": str(self.log)}
        return subprocess.Popen(
            [str(self.root / "scripts" / script), *arguments],
            cwd=cwd or self.root,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, *arguments: str, cwd: Path | None = None) -> str:
        out, err = self.start(script, *arguments, cwd=cwd).communicate(timeout=120)
        assert "Traceback" not in err, err
        return out

    @property
    def tested(self) -> str:
        return f"--constraint {self.root / 'scripts' / 'constraints.txt'}"

    @property
    def installs(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "clone with a blank"
    root.mkdir()
    return Checkout(root)


def test_serve_sets_up_once_and_passes_everything_on(checkout, tmp_path):
    # Relative paths among the options are the user's, so the folder stays as it was.
    said = checkout.run("serve", "--model", "my model", "--port", "0", cwd=tmp_path)
    assert said == f"served in {tmp_path}: serve --model my model --port 0\n"
    assert len(checkout.installs) == 1
    assert checkout.installs == [f"{INSTALL} {checkout.root} {checkout.tested}"]

    checkout.run("serve")
    assert len(checkout.installs) == 1

    (checkout.root / "pyproject.toml").write_text("[project]\n# another dependency\n")
    checkout.run("serve")
    assert len(checkout.installs) == 2


def test_other_versions_do_where_the_tested_ones_cannot_be_had(checkout, monkeypatch):
    monkeypatch.setenv("NONE_OF", "--constraint")
    assert checkout.run("serve", "a").endswith("serve a\n")
    tried, taken = checkout.installs
    assert tried == f"{taken} {checkout.tested}"


def test_other_tested_versions_are_installed(checkout):
    checkout.run("serve")
    (checkout.root / "scripts" / "constraints.txt").write_text("torch==2.12.0\n")
    checkout.run("serve")
    assert len(checkout.installs) == 2


def test_concurrent_first_runs_set_up_once(checkout):
    runs = [checkout.start("serve", name) for name in ("first", "second", "third")]
    said = [run.communicate(timeout=120)[0] for run in runs]
    assert [text.split()[-1] for text in said] == ["first", "second", "third"]
    assert len(checkout.installs) == 1


def test_an_interrupted_set_up_is_made_again(checkout):
    (checkout.root / ".venv" / "bin").mkdir(parents=True)
    (checkout.root / ".venv" / "bin" / "python").write_text("")
    assert checkout.run("serve", "a").endswith("serve a\n")
    assert len(checkout.installs) == 1


def test_test_installs_the_test_tools_which_serve_then_finds_done(checkout):
    checkout.run("test")
    assert checkout.installs == [f"{INSTALL} {checkout.root}[test] {checkout.tested}"]
    checkout.run("serve")
    assert len(checkout.installs) == 1


def test_failing_set_up_is_told_and_leaves_no_stamp(checkout):
    (checkout.root / "fake" / "pip" / "__main__.py").write_text("import sys\nsys.exit(3)")
    process = checkout.start("serve")
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "setting up .venv failed" in err
    assert not (checkout.root / ".venv" / ".loomserve-serve").exists()
