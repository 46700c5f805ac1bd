#!/usr/bin/env python
"""Mutation testing: plants mistakes into a copy of this tree, one at a time, and reports which
the tests notice.

    scripts/plant_faults.py                       all of them; takes an hour or so
    scripts/plant_faults.py --area cache          those of one area
    scripts/plant_faults.py --only 12 57          those with these numbers
    scripts/plant_faults.py --sample 100          a hundred drawn by chance, always the same
    scripts/plant_faults.py --results found.jsonl keeps what was found, and leaves out what is there
    scripts/plant_faults.py --check               only looks whether each can still be planted

For each mistake the fast tests of its area run until the first one fails, without the tests that
fail anyway; then, for the mistakes that none has noticed, all tests of their areas. The exit status
is 1 if one was not noticed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.faults.plant import Plant
from scripts.faults.plants import AREAS, LEFT_OUT, PLANTS

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("server", "runtime", "ops", "tests", "scripts", "pyproject.toml", "README.md", "docs")
# A mistake that makes the tests take so many times as long as without it has made them hang.
PATIENCE, LEAST_PATIENCE_S = 3, 60
# What tests import beside this project: once for all, since each mistake has a fork of its own.
LIBRARIES = (
    "aiohttp",
    "h11",
    "hypothesis",
    "jinja2",
    "llguidance",
    "numpy",
    "orjson",
    "prometheus_client",
    "tokenizers",
    "torch",
    "triton",
    "uvloop",
)
# As tests/conftest.py has it, before anything imports torch and triton.
ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "TRITON_DEFAULT_FP_FUSION": "1",
    "OMP_NUM_THREADS": "1",
}


def cannot_plant(plant: Plant) -> str | None:
    """Why a mistake cannot be planted; None where it can."""
    count = (ROOT / plant.file).read_text().count(plant.old)
    return None if count == 1 else f"{plant.file}: {plant.old!r} stands there {count} times"


class Nursery:
    """A copy of this tree that mistakes are planted into.

    Args: tree: an empty folder.
    """

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, tree / name)
        self._without = functools.cache(self._run_without)

    def noticed(self, plant: Plant, marker: str) -> str | None:
        """The test that notices a mistake; None where none does. marker: of the tests to run."""
        path = self._tree / plant.file
        right = path.read_text()
        failing, usual_s = self._without(plant.area, marker)
        longest_s = max(LEAST_PATIENCE_S, PATIENCE * usual_s)
        options = ["-x", "-m", marker, *(f"--deselect={one}" for one in failing)]
        path.write_text(right.replace(plant.old, plant.new))
        try:
            found = self._failures([*by_likelihood(plant), *options], longest_s)
        finally:
            path.write_text(right)
        return found[0] if found else None

    def _run_without(self, area: str, marker: str) -> tuple[list[str], float]:
        """The tests of an area that fail without a mistake, and what they take."""
        started = time.perf_counter()
        failing = self._failures([*tests_of(area), "-m", marker], None)
        return failing, time.perf_counter() - started

    def _failures(self, arguments: Sequence[str], longest_s: float | None) -> list[str]:
        """The tests that fail."""
        output = self._tree / "output.txt"
        left_out = [f"--deselect={one}" for one in LEFT_OUT]
        process = multiprocessing.get_context("fork").Process(
            target=_run_tests, args=(self._tree, [*arguments, *left_out], output)
        )
        process.start()
        process.join(longest_s)
        if process.is_alive():
            process.kill()
            process.join()
            return ["one that does not end"]
        if process.exitcode == 0:
            return []
        if process.exitcode is not None and process.exitcode < 0:
            return ["a crash"]
        told = output.read_text()
        summary = told.rpartition("short test summary info")[2]
        lines = [line for line in summary.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        if not lines:
            raise RuntimeError(f"the tests cannot run:\n{told[-2000:]}")
        return [line.split(" - ")[0].split(maxsplit=1)[1] for line in lines]


def tests_of(area: str) -> list[str]:
    """The test files of an area, in its order; pytest would begin with those of a whole folder."""
    found = [
        file.relative_to(ROOT).as_posix()
        for given in AREAS[area]
        for file in sorted((ROOT / given).glob("test_*.py")) or [ROOT / given]
    ]
    named = [given for given in AREAS[area] if given in found]
    return list(dict.fromkeys([*named, *found]))


def by_likelihood(plant: Plant) -> list[str]:
    """The tests of a mistake's area, those of its own file first, then those that name it."""
    name = Path(plant.file).stem

    def distance(test: str) -> tuple[bool, bool]:
        return Path(test).stem != f"test_{name}", name not in (ROOT / test).read_text()

    return sorted(tests_of(plant.area), key=distance)


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


class Results:
    """What was found, by mistake; kept in a file where there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: dict[Plant, str | None] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                told = json.loads(line)
                self._found[Plant(**told["plant"])] = told["noticed"]

    def __contains__(self, plant: Plant) -> bool:
        return plant in self._found

    def add(self, plant: Plant, noticed: str | None) -> None:
        self._found[plant] = noticed
        if self._path is not None:
            with self._path.open("a") as file:
                print(json.dumps({"plant": asdict(plant), "noticed": noticed}), file=file)

    def table(self, plants: Iterable[Plant]) -> str:
        """Of those that were planted, how many were noticed, by area."""
        planted = [plant for plant in plants if plant in self]
        counts = Counter(plant.area for plant in planted)
        noticed = Counter(plant.area for plant in planted if self._found[plant] is not None)
        rows = [f"| {area} | {counts[area]} | {noticed[area]} |" for area in AREAS if counts[area]]
        total = f"| all | {counts.total()} | {noticed.total()} |"
        return "\n".join(["| area | planted | noticed |", "|---|---:|---:|", *rows, total])

    def all_noticed(self, plants: Iterable[Plant]) -> bool:
        return all(self._found.get(plant) is not None for plant in plants)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--area", choices=AREAS, help="one area alone")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers of mistakes")
    parser.add_argument("--sample", type=int, metavar="N", help="so many of them, by chance")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="keep what is found; leave out what is there"
    )
    parser.add_argument("--check", action="store_true", help="run no tests")
    options = parser.parse_args()
    misplaced = list(filter(None, map(cannot_plant, PLANTS)))
    if misplaced:
        print(*misplaced, sep="\n")
        return 1
    chosen = {
        number: plant
        for number, plant in enumerate(PLANTS)
        if options.area in (None, plant.area) and number in (options.only or [number])
    }
    if options.sample is not None:
        numbers = random.Random(0).sample(list(chosen), min(options.sample, len(chosen)))
        chosen = {number: chosen[number] for number in numbers}
    if options.check:
        print(f"{len(chosen)} mistakes can be planted")
        return 0
    os.environ.update(ENVIRONMENT)
    for name in LIBRARIES:
        importlib.import_module(name)
    results = Results(options.results)
    with tempfile.TemporaryDirectory() as folder:
        nursery = Nursery(Path(folder))
        for marker in ("not slow", ""):
            for number, plant in chosen.items():
                if plant in results:
                    continue
                started = time.perf_counter()
                noticed = nursery.noticed(plant, marker)
                if noticed or not marker:
                    results.add(plant, noticed)
                seconds = time.perf_counter() - started
                told = noticed or f"not noticed: {plant.file}: {plant.old!r} -> {plant.new!r}"
                print(f"{number:3d} {plant.area:9s} {seconds:5.1f} s  {told}", flush=True)
    print(f"\n{results.table(chosen.values())}")
    return 0 if results.all_noticed(chosen.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
