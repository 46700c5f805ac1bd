#!/usr/bin/env python
"""Plants small mistakes into a copy of this tree, one at a time, and tells which ones tests notice.

    scripts/plant_faults.py                       all of them; takes an hour or so
    scripts/plant_faults.py --area cache          those of one area
    scripts/plant_faults.py --only 12 57          those with these numbers
    scripts/plant_faults.py --check               only looks whether each can still be planted

For each mistake the fast tests of its area run until the first that fails. The exit status is 1
where one was not noticed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts._planted_faults import AREAS, PLANTS, Plant

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("server", "runtime", "ops", "tests", "scripts", "pyproject.toml", "README.md", "docs")
LONGEST_S = 300


def cannot_plant(plant: Plant) -> str | None:
    """Why a mistake cannot be planted; None where it can."""
    count = (ROOT / plant.file).read_text().count(plant.old)
    return None if count == 1 else f"{plant.file}: {plant.old!r} stands there {count} times"


def noticed(tree: Path, plant: Plant) -> str | None:
    """The test that notices the mistake; None where none does."""
    path = tree / plant.file
    right = path.read_text()
    path.write_text(right.replace(plant.old, plant.new))
    try:
        for tests in AREAS[plant.area]:
            found = _first_failure(tree, tests)
            if found is not None:
                return found
    finally:
        path.write_text(right)
    return None


def _first_failure(tree: Path, tests: str) -> str | None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
    ]
    try:
        done = subprocess.run(
            [*command, "--durations=0", tests],
            cwd=tree,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
        )
    except subprocess.TimeoutExpired:
        return f"{tests} (does not end)"
    if done.returncode in (0, 5):
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0].split(" - ")[0].split(maxsplit=1)[1] if lines else tests


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
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, tree / name)
        for number, plant in chosen:
            started = time.perf_counter()
            found = noticed(tree, plant)
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
