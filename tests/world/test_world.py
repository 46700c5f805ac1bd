"""The whole server in simulated worlds: many seeds, whose every answer is known beforehand."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.world.world import run

ROOT = Path(__file__).resolve().parents[2]
FEW, BLOCKS, BLOCK = 20, 20, 100


def check(seeds):
    reports = [run(seed) for seed in seeds]
    wrong = {report.seed: report.problems for report in reports if report.problems}
    assert wrong == {}
    return reports


def test_a_few_worlds():
    reports = check(range(FEW))
    assert len(set[str]().union(*(report.faults for report in reports))) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS))
def test_two_thousand_worlds(block):
    reports = check(range(block * BLOCK, (block + 1) * BLOCK))
    assert statistics.median(report.requests for report in reports) >= 20
    assert statistics.median(len(report.faults) for report in reports) >= 3


def test_a_seed_gives_the_same_run_again_whatever_hashes_are():
    seeds = [3, 56, 109]
    program = (
        "import json; from tests.world.world import run;"
        f"print(json.dumps([[r.trace, r.steps] for r in map(run, {seeds})]))"
    )
    found = []
    for hashes in ("1", "2"):
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
    assert found == [here, here]
