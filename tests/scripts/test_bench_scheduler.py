"""The cases with bounds, run small: every one gives a figure, and is said to be ok or over."""

from __future__ import annotations

import pytest

from scripts import _scheduler_cases as cases
from scripts import bench_scheduler as bench


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_case_runs_small(case):
    assert case.run(0.02) > 0
    assert case.bound_us in (cases.PASS_US, cases.SLICE_US) or case.bound_us < cases.SLICE_US


def test_figures_stand_beside_their_bounds(capsys, monkeypatch):
    made = [
        cases.Case("a fast case", lambda scale: 12.34 * scale, 20.0),
        cases.Case("a slow case", lambda scale: 30.0 * scale, 20.0),
    ]
    monkeypatch.setattr(bench, "CASES", made)
    found = bench.bench_bounds(steps=1)["bounds"]
    assert found["a fast case"] == {"us": 12.3, "bound_us": 20.0, "ok": True}
    assert found["a slow case"]["ok"] is False
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["12.3", "20", "ok", "a", "fast", "case"]
    assert lines[2] == ["30.0", "20", "over", "a", "slow", "case"]


@pytest.mark.parametrize(("microseconds", "status"), [(12.0, 0), (30.0, 1)])
def test_the_exit_status_tells_whether_bounds_were_kept(monkeypatch, microseconds, status):
    monkeypatch.setattr(bench, "CASES", [cases.Case("a case", lambda scale: microseconds, 20.0)])
    monkeypatch.setattr("sys.argv", ["bench_scheduler.py", "bounds"])
    assert bench.main() == status
