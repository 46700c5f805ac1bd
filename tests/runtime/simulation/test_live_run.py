"""A recorded run, read back: arrivals, what clients saw, step costs; and asked "what if"."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

import pytest

from runtime.request import FinishReason
from runtime.simulation.cost_fit import fit_cost_model
from runtime.simulation.cost_model import CostModel, StepTimer
from runtime.simulation.live_run import LiveRun, read_live_run
from runtime.simulation.machines import Machine
from runtime.simulation.recorder import RecordingScheduler
from runtime.simulation.scenario import simulate
from runtime.simulation.simulator import HostCost, SimulationResult, Simulator
from runtime.simulation.trace import Trace, TraceWriter, config_from, read_trace
from runtime.simulation.workloads import Workload
from tests.values import present

if TYPE_CHECKING:
    from runtime.simulation.workloads import Arrival

ROOT = Path(__file__).parents[3]
COST = CostModel(
    step_s=12e-3, token_s=0.4e-3, knee_tokens=8.0, pair_s=0.2e-6, context_s=2e-6, sigma=0.02
)
OPTIONS = {"capacity_tokens": 16_384, "context_length": 2048, "chunked_prefill_size": 128}


def arrivals() -> list[Arrival]:
    made = Workload(
        requests=60, rate=4.0, input_tokens=(20, 400), output_tokens=(5, 60), max_new_factor=2.0
    ).arrivals()
    made[7].abort_after_s, made[7].output_tokens, made[7].max_new_tokens = 0.3, 1000, 1000
    return made


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SimulationResult]:
    """A run in virtual time through the recorder: a trace whose truth is known."""
    path = tmp_path_factory.mktemp("live") / "trace.jsonl"
    config = config_from(OPTIONS)
    scheduler = RecordingScheduler(config, TraceWriter(path, config))
    result = Simulator(scheduler, StepTimer(COST, seed=11)).run(arrivals())
    scheduler.close()
    return path, result


@pytest.fixture(scope="module")
def live(recorded: tuple[Path, SimulationResult]) -> tuple[Trace, LiveRun]:
    trace = read_trace(recorded[0])
    return trace, read_live_run(trace)


def test_clients_view_is_read_back(
    recorded: tuple[Path, SimulationResult], live: tuple[Trace, LiveRun]
) -> None:
    result, run = recorded[1], live[1]
    origin_s = result.requests[0].arrival_s
    assert list(run.stats) == [r.request_id for r in result.requests]
    for seen in result.requests:
        read = run.stats[seen.request_id]
        assert read.arrival_s == pytest.approx(seen.arrival_s - origin_s)
        assert (read.tokens, read.input_tokens) == (seen.tokens, seen.input_tokens)
        assert read.finish == seen.finish
        if seen.tokens:
            assert read.ttft_s == pytest.approx(seen.ttft_s)
            assert read.longest_gap_s == pytest.approx(seen.longest_gap_s)


def test_arrivals_are_read_back(live: tuple[Trace, LiveRun]) -> None:
    for read, made in zip(live[1].arrivals, arrivals(), strict=True):
        assert read.input_ids == made.input_ids
        assert read.max_new_tokens == made.max_new_tokens
        if made.abort_after_s is None:
            assert read.output_tokens == made.output_tokens
        else:
            assert read.abort_after_s == pytest.approx(made.abort_after_s, abs=0.1)


def test_costs_are_fitted_from_the_trace(live: tuple[Trace, LiveRun]) -> None:
    fit = fit_cost_model(live[1].step_times)
    assert fit.error < 0.03
    works = [time.work for time in live[1].step_times]
    ratio = mean(fit.model.seconds(s) / COST.seconds(s) for s in works)
    assert ratio == pytest.approx(1.0, abs=0.02)


def test_simulating_again_comes_close_to_the_recorded_run(
    recorded: tuple[Path, SimulationResult], live: tuple[Trace, LiveRun]
) -> None:
    trace, run = live
    where = Machine(fit_cost_model(run.step_times).model, HostCost(), trace.options)
    again = simulate(where, run.arrivals)
    assert [r.tokens for r in again.requests if present(r.finish).reason is FinishReason.STOP] == [
        r.tokens for r in recorded[1].requests if present(r.finish).reason is FinishReason.STOP
    ]
    before = mean(r.ttft_s for r in run.stats.values() if r.tokens)
    after = mean(r.ttft_s for r in again.requests if r.tokens)
    assert after == pytest.approx(before, rel=0.05)


def test_another_option_changes_what_clients_would_see(live: tuple[Trace, LiveRun]) -> None:
    trace, run = live
    where = Machine(COST, HostCost(), trace.options)
    mixed, strict = (
        simulate(where, run.arrivals, {"disable_mixed_chunk": s}) for s in (False, True)
    )
    assert max(strict.gaps_s) > max(mixed.gaps_s)


def test_time_outs_and_failures_run_to_their_length(live: tuple[Trace, LiveRun]) -> None:
    trace = live[0]
    events = [(n, json.loads(json.dumps(e))) for n, e in trace.events]
    ended = next(o for _, e in events if e["event"] == "commit" for o in e["outputs"] if o[2])
    ended[2] = ["error", None, "the device was lost"]
    run = read_live_run(replace(trace, events=events))
    arrival = next(a for a in run.arrivals if a.request_id == ended[0])
    assert arrival.output_tokens == arrival.max_new_tokens


def test_command_compares_options_per_request(
    recorded: tuple[Path, SimulationResult], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    differences, picture = tmp_path / "differences.jsonl", tmp_path / "picture.png"
    command = [
        sys.executable, str(ROOT / "scripts" / "simulate.py"), "--live", str(recorded[0]),
        "--what-if", "chunked_prefill_size=32", "--differences", str(differences),
        "--plot", str(picture),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "chunked_prefill_size=32" in done.stdout
    lines = [json.loads(line) for line in differences.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 60
    assert set(lines[0]) == {"request_id", "live", "simulated", "chunked_prefill_size=32"}
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "chunk=3"], "NAME=VALUE"),
        (["--set", "chunked_prefill_size=3"], "at least two pages"),
        (["--lengths", "/does/not/exist"], "No such file"),
        (["--input-tokens", "0:5"], "input_tokens"),
    ],
    ids=["name", "value", "file", "span"],
)
def test_wrong_use_of_the_command_is_told_in_a_line(arguments: list[str], message: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "simulate.py"), "--requests", "1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
