"""Kernels compiled beside the rest of a first start, by a stand-in for a compiler."""

from __future__ import annotations

import dataclasses
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ops.cpu import build
from runtime.config import RunnerConfig
from runtime.execution import early_kernels
from runtime.execution.early_kernels import compiling_kernels

COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo 1; exit 0; fi
case "$*" in *" -E "*) exit 0;; esac  # whether it knows some options
echo $$ >> "$FAKE_LOG"
[ -n "$FAKE_SLEEP" ] && exec sleep "$FAKE_SLEEP"
while [ $# -gt 1 ]; do [ "$1" = -o ] && echo object > "$2"; shift; done
exit 0
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of the fake compiler: the ids of its processes."""
    if not build.available_paths():
        pytest.skip("this CPU has no path of the kernels")
    program, log = tmp_path / "fake-c++", tmp_path / "log"
    program.write_text(COMPILER)
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    log.write_text("")
    for name, value in (("CXX", program), ("FAKE_LOG", log), ("FAKE_SLEEP", "")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(early_kernels, "_GPU_FILES", ())
    return log


def test_what_is_compiled_beside_is_found_afterwards(compiler: Path, tmp_path: Path) -> None:
    config = RunnerConfig(cache_dir=str(tmp_path / "cache"))
    said: list[str] = []
    with compiling_kernels(config, said.append) as done:
        done()
    assert build.is_built(build.choose_path(), tmp_path / "cache")
    count = len(list(build.SOURCES.glob("*.cpp")))
    assert said[-1] == f"compiling: {count} of {count} files of CPU kernels"
    runs = compiler.read_text()
    with compiling_kernels(config, said.append) as done:  # nothing is left to do
        done()
    build.build_library(build.choose_path(), tmp_path / "cache")
    assert compiler.read_text() == runs


@pytest.mark.parametrize("config", [RunnerConfig(device="cuda"), RunnerConfig(cpu_kernels="torch")])
def test_what_will_not_be_wanted_is_not_compiled(
    compiler: Path, tmp_path: Path, config: RunnerConfig
) -> None:
    config = dataclasses.replace(config, cache_dir=str(tmp_path / "cache"))
    with compiling_kernels(config, print) as done:
        done()
    assert compiler.read_text() == ""


def test_a_start_that_fails_ends_the_compilers_at_once(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SLEEP", "1000")
    config = RunnerConfig(cache_dir=str(tmp_path / "cache"))
    with compiling_kernels(config, print):
        assert _within_a_minute(lambda: bool(compiler.read_text()))
    processes = [int(line) for line in compiler.read_text().split()]
    assert _within_a_minute(lambda: not any(map(_runs, processes)))


def _within_a_minute(happens: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not happens():
        if time.monotonic() > deadline:
            return False
    return True


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_where_nothing_can_be_compiled_nothing_is_said(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    with compiling_kernels(RunnerConfig(cache_dir=str(tmp_path / "file")), print) as done:
        done()
    assert not build.is_built(build.choose_path(), tmp_path / "file")
