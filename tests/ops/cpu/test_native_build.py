"""Building and choosing the kernels: once per machine, and plain torch where it cannot be done."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
import shutil
import stat
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ops.cpu import build, load
from ops.cpu.library import Library
from ops.cpu.load import CpuOptions, load_cpu_ops
from ops.cpu.native import NativeOps
from ops.cpu.op_set import CpuOps
from tests.cache import cache_folder

# Stands in for a compiler: writes the file that -o names, and notes that it ran.
FAKE_COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "fake $FAKE_VERSION"; exit 0; fi
case "$*" in *" -E "*) exit 0;; esac  # whether it knows some options
echo "$@" >> "$FAKE_LOG"
[ -n "$FAKE_ERROR" ] && { echo "$FAKE_ERROR" >&2; exit 1; }
while [ $# -gt 1 ]; do [ "$1" = -o ] && echo object > "$2"; shift; done
exit 0
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of a fake compiler, one line per run."""
    program, log = tmp_path / "fake-c++", tmp_path / "log"
    program.write_text(FAKE_COMPILER)
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    log.write_text("")
    for name, value in (("CXX", program), ("FAKE_LOG", log), ("FAKE_ERROR", "")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("FAKE_VERSION", "1")
    return log


def test_a_second_build_finds_the_first(compiler: Path, tmp_path: Path) -> None:
    said: list[str] = []
    first = build.build_library("avx2", tmp_path / "cache", said.append)
    runs = compiler.read_text()
    assert len(runs.splitlines()) == len(list(build.SOURCES.glob("*.cpp"))) + 1  # and the linker
    assert "compiling" in said[0]
    assert build.build_library("avx2", tmp_path / "cache", said.append) == first
    assert compiler.read_text() == runs


def test_another_compiler_path_or_flag_is_another_library(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = {build.build_library(path, tmp_path) for path in build.INSTRUCTION_PATHS}
    built.add(build.build_library("avx2", tmp_path, extra_flags=["-g"]))
    monkeypatch.setenv("FAKE_VERSION", "2")
    built.add(build.build_library("avx2", tmp_path))
    assert len(built) == len(build.INSTRUCTION_PATHS) + 2


def test_a_path_that_the_compiler_does_not_know_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "old-c++"
    program.write_text('#!/bin/sh\ncase "$*" in *-mavxvnni*) exit 1;; esac\n')
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.setattr(build, "available_paths", lambda: ["avx2_vnni", "avx2"])
    assert build.choose_path() == "avx2"
    assert build.choose_path("avx2_vnni") == "avx2_vnni"  # whoever asks for it is told why not
    program.write_text("#!/bin/sh\n")
    assert build.choose_path() == "avx2_vnni"


def test_where_the_system_refuses_amx_the_next_path_is_taken_and_said_so(
    compiler: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    amx = frozenset(build.INSTRUCTION_PATHS["amx_bf16"])
    monkeypatch.setattr(build, "cpu_flags", lambda: amx)
    monkeypatch.setattr(build, "tiles_refused", lambda: True)
    assert build.choose_path() == "avx512_bf16"
    with pytest.raises(build.KernelBuildError, match=r"'amx_bf16': .*does not let it use AMX"):
        build.choose_path("amx_bf16")
    monkeypatch.setattr(load, "Library", lambda *arguments: SimpleNamespace(threads=2))
    monkeypatch.setattr(load, "NativeOps", lambda library: library)
    with caplog.at_level(logging.WARNING):
        _, description = load_cpu_ops(CpuOptions(tmp_path), lambda _: None)
    assert description == "native avx512_bf16, 2 threads"
    (said,) = [record.getMessage() for record in caplog.records]
    assert "the system does not let this process use it" in said
    monkeypatch.setattr(build, "tiles_refused", lambda: False)
    assert build.choose_path() == "amx_bf16"


def test_only_a_cpu_with_amx_can_be_refused_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"avx2"}))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("the system was asked"))
    build.tiles_refused.cache_clear()
    assert not build.tiles_refused()
    build.tiles_refused.cache_clear()


def test_the_compiler_is_given_its_own_names_of_instruction_sets() -> None:
    assert build.machine_flags("avx2_vnni") == ("-mavx2", "-mfma", "-mf16c", "-mavxvnni")
    assert build.machine_flags("amx_bf16")[-3:] == ("-mamx-tile", "-mamx-bf16", "-mamx-int8")


def test_changed_sources_are_another_library(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build.build_library("avx2", tmp_path / "cache")
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "other.cpp").write_text("int x;")
    monkeypatch.setattr(build, "SOURCES", sources)
    second = build.build_library("avx2", tmp_path / "cache")
    (sources / "other.h").write_text("// included")
    assert len({first, second, build.build_library("avx2", tmp_path / "cache")}) == 3


def test_processes_that_start_together_build_once(compiler: Path, tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=build.build_library, args=("avx2", tmp_path / "cache"))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum("-shared" in run for run in compiler.read_text().splitlines()) == 1


def test_a_failed_build_leaves_nothing_and_says_why(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ERROR", "as: a hint\nerror: the disk is on fire\nmore")
    with pytest.raises(
        build.KernelBuildError, match="fake-c\\+\\+ failed: error: the disk is on fire"
    ):
        build.build_library("avx2", tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache" / "kernels").iterdir()] == ["lock"]


def built(compiler: Path) -> int:
    return sum("-shared" in run for run in compiler.read_text().splitlines())


@pytest.mark.parametrize("damage", ["cut", "other", "no-checksum", "empty-checksum", "empty"])
def test_a_library_that_is_not_what_was_built_is_built_again(
    compiler: Path, tmp_path: Path, damage: str
) -> None:
    library = build.build_library("avx2", tmp_path / "cache")
    whole = library.read_bytes()
    checksum = library.with_suffix(".sha256")
    if damage == "no-checksum":
        checksum.unlink()
    elif damage == "empty-checksum":
        checksum.write_text("")
    else:
        library.write_bytes({"cut": whole[:-1], "other": b"x" + whole[1:], "empty": b""}[damage])
    assert build.build_library("avx2", tmp_path / "cache") == library
    assert built(compiler) == 2
    assert library.read_bytes() == whole
    build.build_library("avx2", tmp_path / "cache")
    assert built(compiler) == 2


@pytest.mark.parametrize("which", ["folder", "library"])
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_nothing_is_taken_that_others_may_write_to(
    compiler: Path, tmp_path: Path, which: str, mode: int
) -> None:
    library = build.build_library("avx2", tmp_path / "cache")
    path = library if which == "library" else library.parent
    path.chmod(mode)
    with pytest.raises(build.KernelBuildError, match=f"{path} can be written by others"):
        build.build_library("avx2", tmp_path / "cache")
    assert built(compiler) == 1


def test_nothing_is_taken_from_a_folder_of_another_user(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() == 0:  # its own files are everybody's
        os.chown(tmp_path / "fake-c++", 1234, -1)
        with pytest.raises(build.KernelBuildError, match=r"another user \(id 1234\)"):
            build.check_owner(tmp_path / "fake-c++")
        return
    library = build.build_library("avx2", tmp_path / "cache")
    monkeypatch.setattr(os, "geteuid", lambda: 1 + library.stat().st_uid)
    with pytest.raises(build.KernelBuildError, match="another user"):
        build.build_library("avx2", tmp_path / "cache")


def test_what_is_built_is_nobody_else_s_to_write_whatever_the_umask(
    compiler: Path, tmp_path: Path
) -> None:
    before = os.umask(0)
    try:
        library = build.build_library("avx2", tmp_path / "cache")
    finally:
        os.umask(before)
    assert stat.S_IMODE(library.stat().st_mode) == 0o755
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o755
    assert build.build_library("avx2", tmp_path / "cache") == library


def test_without_a_compiler_what_was_built_before_serves(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build.build_library("avx2", tmp_path / "cache")
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert build.build_library("avx2", tmp_path / "cache") == library
    with pytest.raises(build.NoCompiler):  # other sources than those it was made of
        build.build_library("avx2", tmp_path / "cache", extra_flags=["-g"])
    library.write_bytes(library.read_bytes()[:-1])
    with pytest.raises(build.NoCompiler):
        build.build_library("avx2", tmp_path / "cache")


def test_what_a_killed_build_left_is_swept_by_the_next(compiler: Path, tmp_path: Path) -> None:
    kernels = tmp_path / "cache" / "kernels"
    (kernels / ".partial-1").mkdir(parents=True)
    (kernels / ".partial-1" / "linear.o").write_text("half")
    library = build.build_library("avx2", tmp_path / "cache")
    there = {path.name for path in kernels.iterdir()}
    assert there == {"lock", library.name, library.with_suffix(".sha256").name}


def test_where_the_build_fails_torch_serves_after_one_line(
    compiler: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("FAKE_ERROR", "a.s: Fatal error: No space left on device\na.o: gone")
    monkeypatch.setattr(build, "available_paths", lambda: ["avx2"])
    with caplog.at_level(logging.INFO):
        ops, description = load_cpu_ops(CpuOptions(tmp_path / "cache"), lambda _: None)
    assert type(ops) is CpuOps
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.endswith("No space left on device")
    assert description.endswith("No space left on device")


def test_an_unwritable_cache_is_an_error_with_its_path(compiler: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(build.KernelBuildError, match=str(tmp_path / "file")):
        build.build_library("avx2", tmp_path / "file")


@pytest.mark.parametrize("missing", ["compiler", "instructions"])
def test_without_compiler_or_instructions_torch_serves(
    missing: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if missing == "compiler":
        monkeypatch.setenv("CXX", "")
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(build, "available_paths", lambda: ["avx2"])
    else:
        monkeypatch.setattr(build, "cpu_flags", frozenset)
    with caplog.at_level(logging.WARNING):
        ops, description = load_cpu_ops(CpuOptions(tmp_path))
    assert type(ops) is CpuOps
    assert description.startswith("torch: ")
    assert len(caplog.records) == 1
    with pytest.raises(build.KernelBuildError):
        load_cpu_ops(CpuOptions(tmp_path, kernels="native"))


def test_kernels_are_chosen_as_asked(best: NativeOps) -> None:
    ops, description = load_cpu_ops(CpuOptions(cache_folder(), kernels="torch"))
    assert type(ops) is CpuOps
    assert description == "torch, as asked for"
    ops, description = load_cpu_ops(CpuOptions(cache_folder(), kernels="native", threads=3))
    assert isinstance(ops, NativeOps)
    assert description == f"native {build.available_paths()[0]}, 3 threads"
    with pytest.raises(ValueError, match="kernels 'fast': expected one of auto, native, torch"):
        load_cpu_ops(CpuOptions(cache_folder(), kernels="fast"))
    with pytest.raises(build.KernelBuildError, match="'neon': this CPU has"):
        load_cpu_ops(CpuOptions(cache_folder(), kernels="native", path="neon"))


def test_pinned_threads_stay_within_the_allowed_cores(best: NativeOps) -> None:
    """More threads than cores wrap around; the kernels compute as before."""
    before = os.sched_getaffinity(0)
    computed: list[torch.Tensor] = []
    allowed: list[set[int]] = []

    def compute() -> None:  # in a thread of its own, which pinning binds to one core
        ops = NativeOps(Library(best.library.path, threads=3, pinning=True))
        computed.append(ops.silu_and_mul(torch.ones(5, 8)))
        allowed.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert torch.equal(computed[0], best.silu_and_mul(torch.ones(5, 8)))
    assert len(allowed[0]) == 1
    assert allowed[0] <= before
    assert os.sched_getaffinity(0) == before


def test_packed_weights_take_only_their_own_memory(best: NativeOps) -> None:
    """bfloat16 panels are as large as the weight, int8 and int4 a half and a third of it."""
    weight = torch.zeros(64, 512, dtype=torch.bfloat16)
    sizes = {
        q: best.pack_linear(weight, quantization=q).panels.nbytes for q in (None, "int8", "int4")
    }
    assert sizes[None] == weight.nbytes
    assert sizes["int8"] <= weight.nbytes * 0.54
    assert sizes["int4"] <= weight.nbytes * 0.32


def test_the_lines_of_quantized_panels_are_fetched_ahead(best: NativeOps) -> None:
    """A compiler may take what only prefetches for nothing, and then the results tell nothing."""
    if platform.machine() != "x86_64" or not shutil.which("objdump"):
        pytest.skip("takes objdump to read x86 code")
    command = ["objdump", "-d", "--no-show-raw-insn", str(best.library.path)]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    tile = re.compile(r"^[0-9a-f]+ <\S*tile_quantized_panels[^@\s]*>:\n((?:.+\n)+)", re.MULTILINE)
    fetches = [body.count("prefetch") for body in tile.findall(code)]
    # Each panel has its scales, and at least two lines of codes.
    assert min(fetches) > 2
