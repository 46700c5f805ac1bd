"""The kernels run clean under the sanitizers of the compiler: AddressSanitizer and
UndefinedBehaviorSanitizer together, and ThreadSanitizer.

The tests of this folder run again in a process of their own on instrumented kernels: an access
outside a tensor, an undefined operation or an unordered access of two threads fails that process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ops.cpu import build
from tests.ops.cpu.conftest import NARROW_VNNI, all_paths, built

FOLDER = Path(__file__).parent
# Accesses are checked by calls: checks in place take the compiler several times as long.
CALLS = "--param=asan-instrumentation-with-call-threshold=0"
MEMORY = f"-fsanitize=address,undefined {CALLS} -fno-sanitize-recover=undefined -O1"
THREADS = "-fsanitize=thread -O1"

# Programs with a fault, which show that the set-up finds it.
OVERRUN = """
#include <stdlib.h>
int main(int argc, char**) {
  int* x = (int*)malloc(4 * sizeof(int));
  x[3] = argc;
  return ((volatile int*)x)[3 + argc];
}
"""
RACE = """
#include <thread>
int x;
int main() {
  std::thread other([] { x++; });
  x++;
  other.join();
}
"""

pytestmark = pytest.mark.slow


def runtimes(*names: str) -> str:
    """The sanitizers' libraries, which must be loaded before anything else."""
    compiler = build.find_compiler()
    found = []
    for name in names:
        command = [compiler, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(path).is_absolute():
            pytest.skip(f"{compiler} has no {name}")
        found.append(path)
    return " ".join(found)


def without_random_addresses() -> list[str]:
    """A command prefix: ThreadSanitizer expects memory where it usually is."""
    prefix = ["setarch", "-R"]
    if not shutil.which("setarch") or subprocess.run([*prefix, "true"], check=False).returncode:
        pytest.skip("addresses cannot be fixed here")
    return prefix


def check_under(
    flags: str, libraries: str, files: list[str], paths: list[str], prefix: list[str]
) -> None:
    for path in paths:  # here, since a compiler that is preloaded as well is twice as slow
        built(path, tuple(flags.split()))
    environment = os.environ | {
        "LD_PRELOAD": libraries,
        "LOOMSERVE_TEST_KERNEL_FLAGS": flags,
        # The interpreter and torch keep memory until the process ends.
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1",
        "OMP_NUM_THREADS": "1",
    }
    command = [*prefix, sys.executable, "-m", "pytest", "-q", "-x"]
    command.append("--capture=sys")  # a report comes from C and ends the process
    names = [f"[{path}{end}" for path in paths for end in ("-", "]")]
    command += ["-k", " or ".join(names), *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "passed" in done.stdout


def available_paths() -> list[str]:
    paths = build.available_paths()
    if not paths:
        pytest.skip("this CPU has no native instruction path")
    return paths


@pytest.mark.parametrize(
    ("flags", "program", "report"),
    [(MEMORY, OVERRUN, "fault.cpp"), (THREADS, RACE, "data race")],
    ids=["memory", "threads"],
)
def test_a_fault_is_found(flags: str, program: str, report: str, tmp_path: Path) -> None:
    runtimes("libasan.so", "libubsan.so", "libtsan.so")
    prefix = without_random_addresses()
    source, binary = tmp_path / "fault.cpp", tmp_path / "fault"
    source.write_text(program)
    compiler = [build.find_compiler(), *flags.split(), "-g", "-pthread", str(source)]
    subprocess.run([*compiler, "-o", str(binary)], check=True)
    done = subprocess.run([*prefix, str(binary)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert report in done.stderr


def test_the_kernels_stay_inside_their_memory() -> None:
    paths = available_paths()
    files = [str(p) for p in sorted(FOLDER.glob("test_native_*.py")) if p != Path(__file__)]
    # The first path and the last share no vector code.
    chosen = sorted({paths[0], paths[-1]})
    check_under(MEMORY, runtimes("libasan.so", "libubsan.so"), files, chosen, [])


def test_layers_of_the_other_paths_stay_inside_their_memory() -> None:
    """Of those whose layers share no code with the first path or the last."""
    chosen = [path for path in ("avx512", NARROW_VNNI) if path in all_paths()[1:]]
    if not chosen:
        pytest.skip("this CPU has no such path")
    files = [str(FOLDER / "test_native_linear.py")]
    check_under(MEMORY, runtimes("libasan.so", "libubsan.so"), files, chosen, [])


def test_the_threads_of_a_step_do_not_race() -> None:
    files = [str(FOLDER / f"test_native_{name}.py") for name in ("decoder", "sampling")]
    prefix = without_random_addresses()
    check_under(THREADS, runtimes("libtsan.so"), files, available_paths()[:1], prefix)
