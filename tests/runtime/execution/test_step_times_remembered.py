"""Step times of an earlier start: taken at the same speed, measured anew at another."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.execution import step_times
from runtime.scheduling.step_time_model import StepFeatures, measure_steps


class Machine:
    """Steps that take 1 ms and 10 us a token, on a machine as fast as told."""

    def __init__(self, folder: Path, **details: str) -> None:
        self.device = SimpleNamespace(parts=SimpleNamespace(library=folder / "kernels.so"))
        self.info = SimpleNamespace(details=details)
        self.speed = 1.0
        self.steps: list[int] = []

    def step(self, tokens: int, history: int, rows: int, row_tokens: int) -> float:
        self.steps.append(tokens)
        return (1e-3 + 1e-5 * (tokens + rows)) / self.speed


@pytest.fixture(autouse=True)
def steps_are_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "time_step", lambda machine, *shape: machine.step(*shape))


def remembered(machine: Any, model: str = "a", bound_s: float = 0.15) -> Any:
    return step_times.remembered_steps(machine, model, bound_s=bound_s, context_length=4096)


def test_a_later_start_at_the_same_speed_takes_two_steps(tmp_path: Path) -> None:
    first, later = Machine(tmp_path), Machine(tmp_path)
    found = remembered(first)
    assert found == measure_steps(Machine(tmp_path).step, bound_s=0.15, context_length=4096)
    later.speed = 1.1
    assert remembered(later) == found
    assert later.steps == [1, 1]
    assert len(first.steps) > 10
    assert all(StepFeatures(*map(int, step[:4])) for step in found)


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_at_another_speed_it_is_measured_anew_and_remembered(speed: float, tmp_path: Path) -> None:
    slow = Machine(tmp_path)
    before = remembered(slow)
    slow.speed = speed
    after = remembered(slow)
    assert after[0][-1] == pytest.approx(before[0][-1] / speed)
    slow.steps.clear()
    assert remembered(slow) == after
    assert len(slow.steps) == 2


def test_another_model_form_bound_or_kernel_has_times_of_its_own(tmp_path: Path) -> None:
    first = remembered(Machine(tmp_path, weights="int8"))
    for machine, options in (
        (Machine(tmp_path, weights="int4"), {}),
        (Machine(tmp_path, weights="int8"), {"model": "b"}),
        (Machine(tmp_path, weights="int8"), {"bound_s": 0.05}),
    ):
        remembered(machine, **options)
        assert len(machine.steps) > 2, options
    assert len(list(tmp_path.glob("step-times-*.json"))) == 4
    again = Machine(tmp_path, weights="int8")
    assert remembered(again) == first
    assert len(again.steps) == 2


@pytest.mark.parametrize(
    "damaged",
    ["", "[", "{}", "null", "[[1, 1, 0, 0]]", '[["1", 1, 0, 0, 1]]', "[[1, 1, 0, 0, -1]]"],
)
def test_a_damaged_file_is_measured_anew(damaged: str, tmp_path: Path) -> None:
    found = remembered(Machine(tmp_path))
    (file,) = tmp_path.glob("step-times-*.json")
    file.write_text(damaged)
    assert remembered(Machine(tmp_path)) == found
    assert json.loads(file.read_text()) == [list(step) for step in found]


def test_where_no_kernels_are_nothing_is_kept(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.device.parts = None
    assert remembered(machine)
    assert list(tmp_path.iterdir()) == []
