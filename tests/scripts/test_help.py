"""Every script says what it is for and names its options; wrong ones are told, with status 2."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
PYTHON = sorted(path for path in SCRIPTS.glob("*.py") if not path.name.startswith("_"))
NEEDED = {"replay.py": ["a.trace"], "check_fleet.py": ["memory"]}
OTHERS_OPTIONS = {"--record"}  # of the server that writes a trace


def run(path: Path, *arguments: str) -> object:
    """The script's exit status. It runs in this process, where what it imports is there already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), *arguments])
        patch.setattr(sys, "path", [*sys.path])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: path.name)
def test_help_says_what_it_is_for_and_names_the_options_that_its_head_speaks_of(path, capsys):
    assert run(path, "--help") == 0
    said = " ".join(capsys.readouterr().out.split())
    head = re.search(r'^"""(.*?)"""', path.read_text(), re.DOTALL | re.MULTILINE)
    assert head is not None
    assert " ".join(head[1].split("\n\n")[0].split()) in said
    assert set(re.findall(r"(?<!\w)--[a-z][a-z-]+", head[1])) - OTHERS_OPTIONS <= set(
        re.findall(r"--[a-z][a-z-]+", said)
    )


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: path.name)
def test_an_option_that_is_not_known_is_told(path, capsys):
    assert run(path, "--no-such-option", *NEEDED.get(path.name, [])) == 2
    assert "--no-such-option" in capsys.readouterr().err


def shell(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPTS / script), *arguments], capture_output=True, text=True, check=False
    )


def test_the_shell_scripts_say_what_they_are_for():
    assert "scripts/test [--fast] [AREA ...]" in shell("test", "--help").stdout
    assert "Areas:" in shell("test", "--help").stdout
    assert "scripts/check [--no-tests]" in shell("check", "--help").stdout


@pytest.mark.parametrize("script", ["test", "check"])
def test_a_word_that_a_shell_script_does_not_know_is_told(script):
    done = shell(script, "schedulling")
    assert done.returncode == 2
    assert "'schedulling'" in done.stderr
