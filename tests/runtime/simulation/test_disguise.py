"""A trace that tells nothing of what was said, and simulates as the one it was made from."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from runtime.simulation import disguise
from runtime.simulation.cost_model import CostModel, StepTimer
from runtime.simulation.live_run import read_live_run
from runtime.simulation.recorder import RecordingScheduler
from runtime.simulation.simulator import Simulator
from runtime.simulation.trace import TraceWriter, config_from, read_trace
from runtime.simulation.what_if import Session
from runtime.simulation.workloads import Arrival, Workload, in_order

OPTIONS = {"capacity_tokens": 8192, "context_length": 2048, "chunked_prefill_size": 128}
COST = CostModel(step_s=10e-3, token_s=0.5e-3, knee_tokens=8.0, pair_s=1e-7, context_s=1e-6)
SECRET = array("i", range(70_000, 70_040))


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A recorded trace, with shared prefixes, tenants and a second turn, and the disguised one."""
    folder = tmp_path_factory.mktemp("disguise")
    recorded, disguised = folder / "trace.jsonl", folder / "disguised.jsonl"
    made = Workload(
        40,
        rate=4.0,
        input_tokens=(20, 200),
        output_tokens=(5, 60),
        prefix_groups=3,
        prefix_tokens=160,
    ).arrivals()
    for index, arrival in enumerate(made):
        arrival.namespace = ("", "tenant-a", "tenant-b")[index % 3]
    first = Arrival(
        0.1, SECRET + array("i", [5] * 60), 64, 64, "turn-1", output_ids=array("i", range(64))
    )
    second = Arrival(6.0, first.input_ids + array("i", range(64)) + SECRET, 9, 9, "turn-2")
    leaves = Arrival(0.2, array("i", [9] * 30), 900, 900, "leaves", abort_after_s=0.5)
    config = config_from(OPTIONS)
    scheduler = RecordingScheduler(config, TraceWriter(recorded, config))
    Simulator(scheduler, StepTimer(COST)).run(in_order([*made, first, second, leaves]))
    scheduler.close()
    disguised.write_text("".join(disguise.disguise(recorded)))
    return recorded, disguised


def test_simulates_as_the_recorded_one(traces: tuple[Path, Path]) -> None:
    reports = []
    for path in traces:
        session = Session()
        loaded = json.loads(session.load(json.dumps({"trace": str(path)})))
        assert "fitted to" in loaded["note"]
        session.start(json.dumps({"options": {"chunked_prefill_size": "64"}}))
        reports.append((loaded, json.loads(session.advance(10**6))["report"]))
    assert reports[0] == reports[1]
    cached = {r["id"]: r["cached_tokens"] for r in reports[1][1]["requests"]}
    assert cached["turn-2"] == 160, "pages of the first turn's prompt and answer"
    assert sum(cached.values()) > 20 * 160, "common prefixes are still common"


def test_no_token_and_no_tenant_can_be_found_in_it(traces: tuple[Path, Path]) -> None:
    recorded, disguised = (path.read_text() for path in traces)
    assert "tenant-a" in recorded
    assert "tenant-a" not in disguised
    given = read_live_run(read_trace(traces[0])).arrivals
    told = read_live_run(read_trace(traces[1])).arrivals
    same = pairs = 0
    for old, new in zip(given, told, strict=True):
        assert len(old.input_ids) == len(new.input_ids)
        same += sum(a == b for a, b in zip(old.input_ids, new.input_ids, strict=True))
        pairs += len(old.input_ids)
    assert same <= pairs / 1000, "no more than by chance"
    assert len(set(told[-1].input_ids)) > len(told[-1].input_ids) - 5, "equal tokens do not show"


def test_prefixes_are_equal_where_they_were_within_a_namespace_only(
    traces: tuple[Path, Path],
) -> None:
    given = read_live_run(read_trace(traces[0])).arrivals
    told = read_live_run(read_trace(traces[1])).arrivals
    for i, (old, new) in enumerate(zip(given, told, strict=True)):
        for other_old, other_new in zip(given[:i], told[:i], strict=True):
            shared = old.input_ids[:160] == other_old.input_ids[:160]
            namespace = old.namespace == other_old.namespace
            assert (new.input_ids[:160] == other_new.input_ids[:160]) == (shared and namespace)


def test_two_tellings_have_nothing_in_common(traces: tuple[Path, Path]) -> None:
    again = [json.loads(line) for line in disguise.disguise(traces[0])]
    before = [json.loads(line) for line in traces[1].read_text().splitlines()]
    ids = [
        [e["request"]["input_ids"] for e in events if e["event"] == "add"]
        for events in (again, before)
    ]
    assert all(a != b for a, b in zip(*ids, strict=True))


def test_command_tells_what_is_there_of_a_trace_that_is_being_written(
    traces: tuple[Path, Path], tmp_path: Path
) -> None:
    lines = traces[0].read_bytes().splitlines(keepends=True)
    (path := tmp_path / "trace.jsonl").write_bytes(b"".join(lines[:400]) + lines[400][:40])
    run = subprocess.run(
        [sys.executable, "-I", disguise.__file__, str(path)], capture_output=True, check=True
    )
    (told := tmp_path / "told.jsonl").write_bytes(run.stdout)
    assert len(read_live_run(read_trace(told)).step_times) > 50
