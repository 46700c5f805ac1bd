"""Simulations in JSON: the same runs as without it, in pieces, and errors that name what is wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from runtime.config import SchedulerOptions
from runtime.options import options_of
from runtime.percentiles import percentile
from runtime.simulation.machines import machine
from runtime.simulation.replay import replay
from runtime.simulation.report import summarize
from runtime.simulation.scenario import simulate
from runtime.simulation.trace import config_from, read_trace
from runtime.simulation.what_if import Session, decisions, open_load
from runtime.simulation.workloads import Arrival, Workload, in_order

MACHINE = "cpu-smollm2-135m"
CHATS = {
    "name": "chat",
    "requests": 30,
    "rate": 3.0,
    "input_tokens": [20, 200],
    "output_tokens": [20, 80],
}
LONG = {
    "name": "long",
    "requests": 2,
    "rate": 0.5,
    "input_tokens": [1500, 3000],
    "output_tokens": [5, 9],
}
LOAD = {"machine": MACHINE, "workloads": [CHATS, LONG]}


def ask(text: str) -> dict[str, Any]:
    answer = json.loads(text)
    assert isinstance(answer, dict)
    return answer


def ran(session: Session, steps: int = 100, **start: Any) -> dict[str, Any]:
    """The report of a run that is told in pieces."""
    assert "error" not in (answer := ask(session.start(json.dumps(start)))), answer
    told, before = ask(session.advance(steps)), 0
    while not told["done"]:
        assert before < told["steps"] <= before + steps + 1
        before = told["steps"]
        told = ask(session.advance(steps))
    return told["report"]


@pytest.fixture(scope="module")
def session() -> Session:
    session = Session()
    assert ask(session.load(json.dumps(LOAD)))["requests"] == 32
    return session


def arrivals() -> list[Arrival]:
    """Those of LOAD, made without JSON."""
    chats = Workload(30, rate=3.0, input_tokens=(20, 200), output_tokens=(20, 80)).arrivals()
    long = Workload(2, rate=0.5, input_tokens=(1500, 3000), output_tokens=(5, 9)).arrivals()
    for name, made in (("chat", chats), ("long", long)):
        for index, arrival in enumerate(made):
            arrival.request_id = f"{name}{index}"
    return in_order([*chats, *long])


@pytest.mark.parametrize("steps", [1, 37, 100_000])
def test_run_in_pieces_is_the_run_in_one(session: Session, steps: int) -> None:
    whole = simulate(machine(MACHINE), arrivals(), {"chunked_prefill_size": 64})
    report = ran(session, steps, options={"chunked_prefill_size": "64"})
    assert report["steps"]["kind"] == whole.steps.kinds
    assert report["steps"]["seconds"] == [round(s, 6) for s in whole.steps.seconds]
    assert report["summary"]["itl"]["max"] == round(summarize(whole).itl.max, 6)
    assert [r["id"] for r in report["requests"]] == [r.request_id for r in whole.requests]
    assert [r["ttft_s"] for r in report["requests"]] == [round(r.ttft_s, 6) for r in whole.requests]
    gaps = dict(zip(report["gaps"]["shares"], report["gaps"]["seconds"], strict=True))
    assert gaps[0.9] == round(percentile(sorted(whole.gaps_s), 0.9), 6)


def test_every_step_accounts_for_its_pool_its_rows_and_its_tokens(session: Session) -> None:
    report = ran(session, options={"capacity_tokens": "6400", "max_running_requests": "8"})
    steps, requests = report["steps"], report["requests"]
    count = len(steps["kind"])
    assert {len(column) for column in steps.values()} == {count}
    for at in range(count):
        used = sum(steps[k][at] for k in ("free_tokens", "cached_tokens", "private_tokens"))
        assert report["capacity_tokens"] - used in (16, 32, 48, 64, 80, 96)  # reserved pages
        assert steps["prefill_rows"][at] + steps["decode_rows"][at] <= 8
        parts = [p for r in requests for p in r["prefills"] if p[0] == at]
        assert sum(tokens for _, _, tokens in parts) == steps["prefill_tokens"][at]
        assert len(parts) == steps["prefill_rows"][at]
        assert steps["running"][at] <= 8
    ends = [a + b for a, b in zip(steps["start_s"], steps["seconds"], strict=True)]
    assert all(end <= start + 2e-6 for end, start in zip(ends, steps["start_s"][1:], strict=False))


def test_waits_by_reason_add_up_to_the_time_until_admission(session: Session) -> None:
    report = ran(session, options={"max_running_requests": "2", "prefill_share": "0"})
    starts, waited_for_rows = report["steps"]["start_s"], 0
    for request in report["requests"]:
        admitted_s = starts[request["prefills"][0][0]]
        waited_s = sum(request["waited_s"].values())
        # The plan that admits is made before its step starts: while the step before it runs.
        assert waited_s <= admitted_s - request["arrival_s"] + 1e-5
        assert waited_s >= admitted_s - request["arrival_s"] - max(report["steps"]["seconds"])
        waited_for_rows += request["waited_s"].get("rows", 0) > 1.0
    assert waited_for_rows > 3
    names = {report["reasons"][index] for index in report["steps"]["blocked"]}
    assert "rows" in names


def test_longest_gap_of_a_request_ends_at_a_step_that_is_as_long(session: Session) -> None:
    report = ran(session, options={"disable_mixed_chunk": "true"})
    worst = max(report["requests"], key=lambda request: request["longest_gap_s"])
    assert worst["longest_gap_s"] == report["summary"]["itl"]["max"]
    steps = report["steps"]
    inside = [
        s
        for at, s in zip(steps["start_s"], steps["seconds"], strict=True)
        if worst["gap_end_s"] - worst["longest_gap_s"] - 1e-5 <= at < worst["gap_end_s"]
    ]
    assert sum(inside) == pytest.approx(worst["longest_gap_s"], rel=0.1)


def test_recorded_trace_is_served_with_its_own_options_and_fitted_costs(tmp_path: Path) -> None:
    packed = Path(__file__).parent / "traces" / "version_1.jsonl.gz"
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(gzip.decompress(packed.read_bytes()))
    session = Session()
    told = ask(session.load(json.dumps({"trace": str(trace)})))
    options = json.loads(trace.read_text().partition("\n")[0])["options"]
    assert told["options"]["chunked_prefill_size"] == options["chunked_prefill_size"]
    assert "fitted to" in told["note"]
    assert len(ran(session)["requests"]) > 0
    named = open_load({"trace": str(trace), "machine": MACHINE})
    assert named.machine.cost == machine(MACHINE).cost
    assert named.machine.options["capacity_tokens"] == options["capacity_tokens"]


def test_described_options_are_all_of_the_scheduler_with_their_bounds() -> None:
    described = {option["name"]: option for option in ask(Session().describe())["options"]}
    assert described.keys() == {
        "capacity_tokens",
        "context_length",
        *(option.name for option in options_of(SchedulerOptions)),
    }
    assert "lpm" in described["schedule_policy"]["choices"]
    assert described["prefill_share"]["at_most"] == 0.9


def test_decisions_are_a_trace_that_replays(tmp_path: Path) -> None:
    text = decisions(json.dumps({**LOAD, "options": {"tpot_slo_ms": "60"}}))
    (path := tmp_path / "trace.jsonl").write_text(text)
    trace = read_trace(path)
    assert trace.options["tpot_slo_ms"] == 60.0
    again = replay(trace, config_from(trace.options))
    assert again.difference is None
    assert again.events == len(trace.events)
    assert sum(event["event"] == "add" for _, event in trace.events) == 32


@pytest.mark.parametrize(
    ("call", "text", "message"),
    [
        ("start", {}, "nothing to serve yet"),
        ("load", {}, "workloads None: must be a list"),
        ("load", {"workloads": [{"requests": 3}], "machine": "abacus"}, "machine 'abacus'"),
        ("load", {"workloads": [{"rate": 1}]}, "how many requests"),
        ("load", {"workloads": [{"requests": "3"}]}, "requests '3': must be a whole number"),
        (
            "load",
            {"workloads": [{"requests": 3, "input_tokens": 7}]},
            "input_tokens 7: must be two",
        ),
        ("load", {"workloads": [{"requests": 3, "hue": 7}]}, "workload field 'hue'"),
        ("load", {"trace": "/nowhere/trace"}, "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_told(call: str, text: dict, message: str) -> None:
    assert message in ask(getattr(Session(), call)(json.dumps(text)))["error"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"colour": "red"}, "NAME=VALUE with NAME one of"),
        ({"chunked_prefill_size": "many"}, "must be a value of type int"),
        ({"chunked_prefill_size": "16"}, "must be at least two pages"),
        ({"schedule_policy": "whim"}, "schedule_policy"),
    ],
)
def test_wrong_option_is_told_and_the_load_is_kept(
    session: Session, options: dict, message: str
) -> None:
    assert message in ask(session.start(json.dumps({"options": options})))["error"]
    assert ask(session.start("{}"))["requests"] == 32
