"""The whole server in simulated worlds: many seeds, whose every answer is known beforehand."""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.effort import some
from tests.world.world import run, settle

ROOT = Path(__file__).resolve().parents[2]
FEW, MANY = 20, 2000


@pytest.fixture(autouse=True)
def settled():
    """All garbage is collected before each world: of worlds alone, not of what other tests left."""
    settle()


def problems_of(reports):
    return {report.seed: report.problems for report in reports if report.problems}


def test_a_few_worlds():
    reports = [run(seed) for seed in range(FEW)]
    assert problems_of(reports) == {}
    assert len(set[str]().union(*(report.faults for report in reports))) >= 12


@pytest.mark.slow
def test_two_thousand_worlds():
    """In processes of their own: all garbage is collected before each world, and there is much less
    to look through where no other test has run."""
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), fresh, settle) as processes:
        reports = list(processes.map(run, range(MANY), chunksize=20))
    assert problems_of(reports) == {}
    assert statistics.median(report.requests for report in reports) >= 20
    assert statistics.median(len(report.faults) for report in reports) >= 3


def test_a_seed_gives_the_same_run_again_whatever_hashes_are():
    seeds = [3, 56, 109]
    program = (
        "import json; from tests.world.world import run;"
        f"print(json.dumps([[r.trace, r.steps] for r in map(run, {seeds})]))"
    )
    found = []
    for hashes in some(("1", "2")):
        environment = {**os.environ, "PYTHONHASHSEED": hashes, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            check=True,
            text=True,
        )
        found.append(json.loads(done.stdout))
    here = [[report.trace, report.steps] for report in map(run, seeds)]
    assert found == [here] * len(found)
