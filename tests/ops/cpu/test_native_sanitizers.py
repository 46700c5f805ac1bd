"""The kernels run clean under AddressSanitizer and UndefinedBehaviorSanitizer.

The tests of this folder run again in a process of their own on instrumented kernels: an access
outside a tensor or an undefined operation ends that process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ops.cpu import build

FOLDER = Path(__file__).parent
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -O1 -fno-omit-frame-pointer"
RUNTIMES = ("libasan.so", "libubsan.so")

# A program that reads one element past its memory: shows that the set-up finds such an access.
OVERRUN = """
#include <stdlib.h>
int main(int argc, char**) {
  int* x = (int*)malloc(4 * sizeof(int));
  x[3] = argc;
  return ((volatile int*)x)[3 + argc];
}
"""


def runtime_libraries() -> list[str]:
    """The sanitizers' runtimes, which must be loaded before anything else."""
    compiler = build.find_compiler()
    command = [compiler, "-print-file-name="]
    found = []
    for name in RUNTIMES:
        command[1] = f"-print-file-name={name}"
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(path).is_absolute():
            pytest.skip(f"{compiler} has no {name}")
        found.append(path)
    return found


@pytest.mark.slow
def test_a_fault_is_found(tmp_path: Path) -> None:
    runtime_libraries()
    source, program = tmp_path / "overrun.cpp", tmp_path / "overrun"
    source.write_text(OVERRUN)
    compile_it = [build.find_compiler(), *FLAGS.split(), str(source), "-o", str(program)]
    subprocess.run(compile_it, check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "overrun.cpp" in done.stderr


@pytest.mark.slow
def test_the_kernels_run_clean() -> None:
    paths = build.available_paths()
    if not paths:
        pytest.skip("this CPU has no native instruction path")
    environment = os.environ | {
        "LD_PRELOAD": " ".join(runtime_libraries()),
        "LOOMSERVE_TEST_KERNEL_FLAGS": FLAGS,
        # The interpreter and torch keep memory until the process ends.
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "1",
    }
    files = [str(p) for p in sorted(FOLDER.glob("test_native_*.py")) if p != Path(__file__)]
    # The first path and the last share no vector code.
    wanted = f"{paths[0]} or {paths[-1]}"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-k", wanted, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "passed" in done.stdout
