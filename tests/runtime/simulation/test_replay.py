"""Recorded decisions are replayed to the byte, and a changed option is found where it first shows."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import ConfigError
from runtime.simulation.replay import replay
from runtime.simulation.trace import config_from, parse_override, read_trace, to_line
from tests.runtime.simulation.live_traffic import LiveTraffic, live_config

ROOT = Path(__file__).parents[3]
STEPS = 1200


def test_a_trace_of_version_1_gives_the_same_decisions(tmp_path: Path) -> None:
    """Recorded by release 0.1.0: chunks, retractions, time-outs, aborts and grammars, two in flight."""
    path = tmp_path / "version_1.jsonl"
    packed = Path(__file__).parent / "traces" / "version_1.jsonl.gz"
    path.write_bytes(gzip.decompress(packed.read_bytes()))
    trace = read_trace(path)
    report = replay(trace, config_from(trace.options))
    assert report.difference is None
    assert report.steps > 400


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LiveTraffic]:
    traffic = LiveTraffic(live_config(), tmp_path_factory.mktemp("trace") / "live.jsonl", seed=7)
    traffic.run(STEPS)
    return traffic.path, traffic


def events_of(path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for _, event in read_trace(path).events if event["event"] == kind]


def test_recorded_run_has_everything_in_it(recorded: tuple[Path, LiveTraffic]) -> None:
    path, traffic = recorded
    plans = [event for event in events_of(path, "plan") if event["batch"]]
    assert len(plans) >= STEPS
    kinds = {
        (
            event["batch"]["num_prefill"] > 0,
            len(event["batch"]["rows"]) > event["batch"]["num_prefill"],
        )
        for event in plans
    }
    assert kinds == {(True, True), (True, False), (False, True)}
    # A chunk that is not its prompt's last is a prefill row that is not sampled.
    assert any(len(e["batch"]["sampled"]) < len(e["batch"]["rows"]) for e in plans)
    for name in (
        "stop", "length", "abort", "timeout", "failed steps", "failed rows", "text stops",
        "retractions", "preemptions", "QueueFull", "groups", "retries",
    ):  # fmt: skip
        assert traffic.counts.get(name, 0) > 0, (name, traffic.counts)
    assert any(event["result"] for event in events_of(path, "flush"))
    assert events_of(path, "grammar")
    assert events_of(path, "change_options")
    assert any(event["reason"] == "wait_commit" for event in events_of(path, "plan"))


def test_chunks_by_time_are_replayed_from_the_measurement_of_the_run(tmp_path: Path) -> None:
    measured = tuple(
        (tokens, tokens * tokens, rows, 65 * rows, 0.001 + 0.0005 * (tokens + rows))
        for tokens in (1, 4, 8, 16, 32)
        for rows in (0, 8)
    )
    config = live_config(chunked_prefill_size=0, step_bound_ms=15.0, measured_steps=measured)
    path = tmp_path / "timed.jsonl"
    LiveTraffic(config, path, seed=3).run(200)
    trace = read_trace(path)
    assert config_from(trace.options) == config
    report = replay(trace, config_from(trace.options))
    assert report.difference is None
    assert report.steps >= 200
    # Another measurement would have led to other steps.
    slower = tuple((*shape, 9 * seconds) for *shape, seconds in measured)
    other = config_from(trace.options, {"measured_steps": slower})
    assert replay(trace, other).difference is not None


def test_saved_recurrent_states_are_replayed(tmp_path: Path) -> None:
    config = live_config(recurrent=True, state_slots=5, state_interval=16)
    path = tmp_path / "recurrent.jsonl"
    LiveTraffic(config, path, seed=5).run(200)
    trace = read_trace(path)
    assert config_from(trace.options) == config
    report = replay(trace, config_from(trace.options))
    assert report.difference is None
    assert report.steps >= 200
    plans = [event["batch"] for event in events_of(path, "plan") if event["batch"]]
    assert any("state_slots" in batch for batch in plans)
    assert any("save_slots" in batch for batch in plans)
    fewer = config_from(trace.options, {"state_slots": 2})
    assert replay(trace, fewer).difference is not None


def test_replay_is_the_same_to_the_byte(recorded: tuple[Path, LiveTraffic]) -> None:
    path, _ = recorded
    trace = read_trace(path)
    report = replay(trace, config_from(trace.options))
    assert report.difference is None
    assert report.events == len(trace.events)
    assert report.steps >= STEPS
    # The file is spelled as the comparison spells it, so equal events are equal bytes.
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    assert lines == [to_line(event) for _, event in trace.events]


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("chunked_prefill_size=16", "batch."),
        ("max_running_requests=3", "batch"),
        ("disable_mixed_chunk=true", "batch"),
        ("schedule_policy=lof", "batch"),
        ("eviction_policy=fifo", "batch"),
        ("schedule_conservativeness=2.5", "batch"),
        ("waiting_timeout_s=0.05", "ended"),
        ("max_queued_requests=1", "error"),
    ],
    ids=lambda text: text.split("=")[0],
)
@pytest.mark.sampled(3)
def test_changed_option_names_the_first_decision_it_changes(
    recorded: tuple[Path, LiveTraffic], override: str, field: str
) -> None:
    trace = read_trace(recorded[0])
    changed = config_from(trace.options, dict([parse_override(override)]))
    report = replay(trace, changed)
    found = report.difference
    assert found is not None
    assert found.expected != found.got
    # All before it was the same: the trace cut there replays without a difference.
    before = [item for item in trace.events if item[0] < found.line]
    assert replay(replace(trace, events=before), changed).difference is None
    line = json.loads(recorded[0].read_text(encoding="utf-8").splitlines()[found.line - 1])
    assert line["event"] == found.event


def test_command_replays_and_names_the_difference(recorded: tuple[Path, LiveTraffic]) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "replay.py"), str(recorded[0])]
    same = subprocess.run(command, capture_output=True, text=True, check=False)
    assert same.returncode == 0, same.stderr
    assert "all the same" in same.stdout
    changed = subprocess.run(
        [*command, "--set", "chunked_prefill_size=64"], capture_output=True, text=True, check=False
    )
    assert changed.returncode == 1
    assert "expected" in changed.stdout
    assert "step" in changed.stdout


def test_tampered_decision_is_found(recorded: tuple[Path, LiveTraffic]) -> None:
    trace = read_trace(recorded[0])
    index = next(
        i for i, (_, e) in enumerate(trace.events) if e["event"] == "plan" and e["batch"]
        and e["batch"]["step"] == 100
    )  # fmt: skip
    line, event = trace.events[index]
    altered = json.loads(to_line(event))
    altered["batch"]["sample_positions"][0] += 1
    events = list(trace.events)
    events[index] = (line, altered)
    found = replay(replace(trace, events=events), config_from(trace.options)).difference
    assert found is not None
    assert (found.line, found.step, found.field) == (line, 100, "batch.sample_positions[0]")
    assert found.expected == found.got + 1


def test_trace_of_a_killed_server_ends_at_its_last_whole_line(
    recorded: tuple[Path, LiveTraffic], tmp_path: Path
) -> None:
    text = recorded[0].read_text(encoding="utf-8")
    cut = tmp_path / "cut.jsonl"
    cut.write_text(text[: len(text) // 2], encoding="utf-8")
    trace = read_trace(cut)
    assert replay(trace, config_from(trace.options)).difference is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not a scheduler trace"),
        ('{"event":"plan"}\n', "not a scheduler trace"),
        ('{"event":"options","version":99,"options":{}}\n', "version 99: must be 1 or 2"),
        ('{"event":"options","version":1,"options":{}}\n{nonsense\n{}\n', ":2: not JSON"),
    ],
    ids=["empty", "headless", "version", "damaged"],
)
def test_what_is_not_a_trace_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("chunked_prefill_size=64", ("chunked_prefill_size", 64)),
        ("--tpot-slo-ms=12.5", ("tpot_slo_ms", 12.5)),
        ("disable-mixed-chunk=true", ("disable_mixed_chunk", True)),
        ("schedule_policy=lpm", ("schedule_policy", "lpm")),
    ],
)
def test_override_takes_the_type_of_its_option(text: str, expected: tuple[str, Any]) -> None:
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["chunk=1", "page_size", "page_size=x", "disable_mixed_chunk=2"])
def test_wrong_override_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=text.split("=")[0]):
        parse_override(text)
