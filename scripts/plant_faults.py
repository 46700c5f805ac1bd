#!/usr/bin/env python
"""Plants small mistakes into a copy of this tree, one at a time, and tells which ones tests notice.

    scripts/plant_faults.py                       all of them; takes an hour or so
    scripts/plant_faults.py --area cache          those of one area
    scripts/plant_faults.py --only 12 57          those with these numbers
    scripts/plant_faults.py --check               only looks whether each can still be planted

For each mistake the fast tests of its area (of some areas the slow ones too) run until the first
that fails, but for those that fail without a mistake as well. The exit status is 1 where one was
not noticed.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts._planted_faults import AREAS, PLANTS, SLOW_TOO, Plant

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("server", "runtime", "ops", "tests", "scripts", "pyproject.toml", "README.md", "docs")
LONGEST_S = 150
# What tests import beside this project: once for all, since each mistake has a fork of its own.
LIBRARIES = ("aiohttp", "h11", "jinja2", "llguidance", "numpy", "tokenizers")


def cannot_plant(plant: Plant) -> str | None:
    """Why a mistake cannot be planted; None where it can."""
    count = (ROOT / plant.file).read_text().count(plant.old)
    return None if count == 1 else f"{plant.file}: {plant.old!r} stands there {count} times"


def noticed(tree: Path, plant: Plant, ignored: Sequence[str]) -> str | None:
    """The test that notices the mistake; None where none does. ignored: tests that fail anyway."""
    path = tree / plant.file
    right = path.read_text()
    path.write_text(right.replace(plant.old, plant.new))
    try:
        options = ["-x", *(f"--deselect={one}" for one in ignored)]
        for tests in runs_of(plant.area):
            if found := failures(tree, [*tests, *options]):
                return found[0]
        return None
    finally:
        path.write_text(right)


def runs_of(area: str) -> list[Sequence[str]]:
    """What pytest is to run for an area, one after the other: its fast tests, then slow ones that
    see what those cannot."""
    slow = SLOW_TOO.get(area)
    return [[*AREAS[area], "-m", "not slow"], *([slow] if slow else [])]


def failures(tree: Path, arguments: Sequence[str]) -> list[str]:
    """The tests that fail."""
    output = tree / "output.txt"
    process = multiprocessing.get_context("fork").Process(
        target=_run_tests, args=(tree, arguments, output)
    )
    process.start()
    process.join(LONGEST_S)
    if process.is_alive():
        process.kill()
        process.join()
        return ["one that does not end"]
    if process.exitcode == 0:
        return []
    told = output.read_text()
    lines = [line for line in told.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if not lines:
        raise RuntimeError(f"the tests cannot run:\n{told[-2000:]}")
    return [line.split(" - ")[0].split(maxsplit=1)[1] for line in lines]


def _run_tests(tree: Path, arguments: Sequence[str], output: Path) -> None:
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if path != str(ROOT))]
    for name in [name for name in sys.modules if name.split(".")[0] == "scripts"]:
        del sys.modules[name]
    # Whatever a mistake has left running ends with this process.
    options = [
        "-q",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
        "-p",
        "no:cacheprovider",
    ]
    status = pytest.main([*options, "--rootdir", str(tree), *arguments])
    sys.stdout.flush()
    os._exit(status)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--area", choices=AREAS, help="one area alone")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers of mistakes")
    parser.add_argument("--check", action="store_true", help="run no tests")
    options = parser.parse_args()
    misplaced = list(filter(None, map(cannot_plant, PLANTS)))
    if misplaced:
        print(*misplaced, sep="\n")
        return 1
    chosen = [
        (number, plant)
        for number, plant in enumerate(PLANTS)
        if options.area in (None, plant.area) and number in (options.only or [number])
    ]
    if options.check:
        print(f"{len(chosen)} mistakes can be planted")
        return 0
    planted: Counter[str] = Counter()
    caught: Counter[str] = Counter()
    for name in LIBRARIES:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, tree / name)
        fail_anyway = {
            area: [test for tests in runs_of(area) for test in failures(tree, tests)]
            for area in {p.area for _, p in chosen}
        }
        for number, plant in chosen:
            started = time.perf_counter()
            found = noticed(tree, plant, fail_anyway[plant.area])
            planted[plant.area] += 1
            caught[plant.area] += found is not None
            seconds = time.perf_counter() - started
            told = found or f"NOT NOTICED: {plant.file}: {plant.old!r} -> {plant.new!r}"
            print(f"{number:3d} {plant.area:9s} {seconds:5.1f} s  {told}", flush=True)
    print("\n| area | planted | noticed |\n|---|---:|---:|")
    for area in AREAS:
        if planted[area]:
            print(f"| {area} | {planted[area]} | {caught[area]} |")
    print(f"| all | {planted.total()} | {caught.total()} |")
    return 0 if planted == caught else 1


if __name__ == "__main__":
    sys.exit(main())
