"""Compiles the CPU kernels of `csrc/` with the system's C++ compiler, once per machine.

Why at first start and not in a wheel: the sources are small (seconds to compile), have a plain C
interface and no torch headers, and so fit any torch version and exactly this CPU. A library is
named by a hash of sources and flags and one of the compiler; it is built in a temporary folder and
moved into place under a lock, so that processes that start together build it once.

What is loaded runs with all rights of the server, so nothing is taken from a folder that others may
write to, and a library that is not what was built (cut short by a full disk, say) is built again.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("c++", "g++", "clang++")
FOLDER = "kernels"  # in the cache folder
_CHECKSUM = ".sha256"  # of the file beside a library; a mapped library that is cut short kills us
_PARTIAL = ".partial-"

# From the fastest to the most common: what the CPU must have (names of /proc/cpuinfo). avx2_vnni is
# what CPUs without AVX-512 have since about 2021.
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
INSTRUCTION_PATHS: dict[str, tuple[str, ...]] = {
    "amx_bf16": (*_AVX512, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"),
    "avx512_bf16": (*_AVX512, "avx512_vnni", "avx512_bf16"),
    "avx512_vnni": (*_AVX512, "avx512_vnni"),
    "avx512": _AVX512,
    "avx2_vnni": (*_AVX2, "avx_vnni"),
    "avx2": _AVX2,
    "neon_matrix": ("asimd", "asimddp", "bf16", "i8mm"),
    "neon_dot": ("asimd", "asimddp"),
    "neon": ("asimd",),
}
_ARM_FLAGS = {
    "neon_matrix": "-march=armv8.2-a+dotprod+bf16+i8mm",
    "neon_dot": "-march=armv8.2-a+dotprod",
    "neon": "-march=armv8-a",
}

# No contraction: a product and a sum become one instruction only where the source says so, so
# that the same expression rounds alike wherever it is inlined.
COMPILE_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-pthread")


class KernelBuildError(Exception):
    """The kernels cannot be built or do not fit this CPU; the message says why."""


class NoCompiler(KernelBuildError):
    """There is none."""


def cpu_flags() -> frozenset[str]:
    """The instruction sets of this CPU, by their names in /proc/cpuinfo; empty if unknown."""
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return frozenset({"asimd", "asimddp"})  # of every one that Apple has made
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    named = (line.partition(":") for line in lines if line.startswith(("flags", "Features")))
    return next((frozenset(flags.split()) for _, _, flags in named), frozenset())


@functools.cache
def tiles_refused() -> bool:
    """Whether this CPU has AMX and the system does not let this process use it. Linux gives no
    thread the 8 KiB of the tiles' registers before it is asked (Documentation/arch/x86/xstate.rst);
    what is granted holds for all threads and for forked children."""
    if "amx_tile" not in cpu_flags():
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data))


def available_paths() -> list[str]:
    """The instruction paths that this CPU has and this process may use, the fastest first."""
    have = cpu_flags()
    if tiles_refused():
        have -= {"amx_tile"}
    return [path for path, needed in INSTRUCTION_PATHS.items() if have.issuperset(needed)]


def choose_path(wanted: str | None = None) -> str:
    """The instruction path that is wanted, or the best of this CPU whose instructions the compiler
    knows.

    Raises:
        KernelBuildError: this CPU does not have it, or none.
    """
    available = available_paths()
    if not available:
        raise KernelBuildError("this CPU has none of the supported instruction sets")
    if wanted is None:
        return next(filter(_known_to_compiler, available), available[0])
    if wanted not in available:
        refused = " (the system does not let it use AMX)" if tiles_refused() else ""
        raise KernelBuildError(
            f"instruction path {wanted!r}: this CPU has {', '.join(available)}{refused}"
        )
    return wanted


def _known_to_compiler(path: str) -> bool:
    """Whether it takes the path's flags; an old one may be younger than the CPU."""
    try:
        command = [find_compiler(), *machine_flags(path), "-x", "c++", "-E", os.devnull]
    except NoCompiler:
        return True  # nothing is compiled, and what was built before serves
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def find_compiler() -> str:
    """The C++ compiler: $CXX, else the first of `COMPILERS` on the path.

    Raises:
        NoCompiler: there is none.
    """
    for name in (os.environ.get("CXX", ""), *COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise NoCompiler(f"no C++ compiler ($CXX, {', '.join(COMPILERS)}) was found")


def build_library(
    path: str,
    cache_dir: Path,
    progress: Callable[[str], None] = lambda message: None,
    extra_flags: Sequence[str] = (),
) -> Path:
    """The shared library for an instruction path, compiled unless the cache has it.

    Args:
        path: a key of `INSTRUCTION_PATHS`.
        progress: is told what is being done, in words.
        extra_flags: further compiler flags, e.g. a sanitizer's.
    Raises:
        KernelBuildError: neither a library nor a compiler is there, the compiler failed (the
            message holds the end of its output), or others may write to the cache.
    """
    flags = (*COMPILE_FLAGS, *machine_flags(path), *extra_flags)
    folder = cache_dir / FOLDER
    stem = f"{path}-{_digest(flags)}"
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        check_owner(folder)
        compiler = find_compiler()
        target = folder / f"{stem}-{_compiler_digest(compiler)}.so"
        if is_whole(target):
            return target
        with _locked(folder / "lock"):
            if not is_whole(target):  # another process may have been first
                _build(compiler, flags, target, progress)
    except NoCompiler:
        found = next(filter(is_whole, sorted(folder.glob(f"{stem}-*.so"))), None)
        if found is None:
            raise
        return found
    except OSError as error:
        raise KernelBuildError(f"the CPU kernels cannot be written to {folder}: {error}") from error
    return target


def is_built(path: str, cache_dir: Path) -> bool:
    """Whether the cache has a library for an instruction path, by whatever compiler.

    Raises:
        KernelBuildError: others may write to it.
    """
    digest = _digest((*COMPILE_FLAGS, *machine_flags(path)))
    return any(map(is_whole, (cache_dir / FOLDER).glob(f"{path}-{digest}-*.so")))


def check_owner(path: Path) -> None:
    """Raises: KernelBuildError: somebody else than this user and root may write to `path`."""
    state = path.stat()
    if state.st_uid not in (os.geteuid(), 0):
        raise KernelBuildError(
            f"{path} belongs to another user (id {state.st_uid}), so no code of it is run;"
            " --cache-dir names another cache folder"
        )
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KernelBuildError(
            f"{path} can be written by others, so no code of it is run; chmod go-w {path}"
            " allows it, once you know what is in there"
        )


def is_whole(library: Path) -> bool:
    """Whether a library is there and is what was built, byte by byte.

    Raises: KernelBuildError: somebody else may write to it.
    """
    try:
        check_owner(library)
        wanted = library.with_suffix(_CHECKSUM).read_text("ascii").strip()
        return hashlib.sha256(library.read_bytes()).hexdigest() == wanted
    except (FileNotFoundError, ValueError):
        return False


def machine_flags(path: str) -> tuple[str, ...]:
    """The compiler's names of a path's instruction sets."""
    if path in _ARM_FLAGS:
        return (_ARM_FLAGS[path],)
    names = (re.sub("^avx(512)?_", r"avx\1", flag) for flag in INSTRUCTION_PATHS[path])
    return tuple("-m" + name.replace("_", "-") for name in names)


def _digest(flags: Sequence[str]) -> str:
    """The digest of what is compiled: flags and sources."""
    digest = hashlib.sha256(" ".join(flags).encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _compiler_digest(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    return hashlib.sha256(compiler.encode() + b"\0" + version).hexdigest()[:8]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file unlocks it


def _build(
    compiler: str, flags: Sequence[str], target: Path, progress: Callable[[str], None]
) -> None:
    sources = sorted(SOURCES.glob("*.cpp"))
    progress(f"compiling the CPU kernels (once), for {target.name}")
    for leftover in target.parent.glob(f"{_PARTIAL}*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=target.parent) as work:
        objects = [Path(work) / f"{source.stem}.o" for source in sources]

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            commands = [
                [compiler, *flags, "-c", str(source), "-o", str(out)]
                for source, out in zip(sources, objects, strict=True)
            ]
            runs = [pool.submit(_run, command) for command in commands]
            try:
                for count, run in enumerate(as_completed(runs), 1):
                    run.result()
                    progress(f"compiling: {count} of {len(sources)} files of CPU kernels")
            finally:
                pool.shutdown(cancel_futures=True)  # where one has failed
        library = Path(work) / target.name
        _run([compiler, *flags, "-shared", *map(str, objects), "-o", str(library)])
        library.chmod(0o755)  # whatever the umask
        checksum = library.with_suffix(_CHECKSUM)
        checksum.write_text(hashlib.sha256(library.read_bytes()).hexdigest() + "\n", "ascii")
        # Whoever comes between the two finds that they do not fit, and waits for the lock.
        os.replace(checksum, target.with_suffix(_CHECKSUM))
        os.replace(library, target)


def _run(command: list[str]) -> None:
    """Raises: KernelBuildError: its first line says what happened, the others all that was told."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        what = next((line for line in lines if "error" in line.lower()), "".join(lines[:1]))
        raise KernelBuildError(
            f"{command[0]} failed: {what}\n{' '.join(command)}\n{done.stderr[-2000:]}"
        )


if __name__ == "__main__":  # python build.py CACHE_DIR: what this machine needs
    build_library(choose_path(), Path(sys.argv[1]), functools.partial(print, flush=True))
