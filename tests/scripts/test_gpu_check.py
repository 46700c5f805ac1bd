"""scripts/gpu_check.py without a GPU: its exit, its imports, and a whole tiny run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from runtime.config import SchedulerOptions
from scripts.gpu.speed import rows_that_pay
from scripts.gpu.table import table
from scripts.gpu_check import Report, build_checks

if TYPE_CHECKING:
    from collections.abc import Callable

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"

# What a machine that only checks its GPU need not have.
WITHOUT_SERVER = """
import runpy, sys
for name in ("orjson", "aiohttp", "uvloop", "prometheus_client", "transformers"):
    sys.modules[name] = None
sys.argv = [sys.argv[1], *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def gpu_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_SERVER, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_readers_of_checkpoints_the_start_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "scripts.gpu.build", raising=False)
    monkeypatch.setitem(sys.modules, "runtime.execution.build", None)
    (check,) = build_checks(None, tiny=True)
    assert (check.name, check.passed) == ("build_runner", None)
    assert "not installed" in check.detail


def decode_rows(
    milliseconds: Callable[[int], float], *, most: int = 1024
) -> list[dict[str, float]]:
    batches = [2**i for i in range(most.bit_length())]
    return [{"batch": float(batch), "ms": milliseconds(batch)} for batch in batches]


def test_rows_pay_as_long_as_twice_as_many_bring_a_quarter_more() -> None:
    assert rows_that_pay(decode_rows(lambda rows: 5.0, most=64)) == 64
    assert rows_that_pay(decode_rows(lambda rows: 1.0 * rows)) == 1
    # From 16 on every row adds what a row takes, so 32 take 1.5 times as long as 16.
    assert rows_that_pay(decode_rows(lambda rows: max(16, rows) / 16 + 1)) == 32


def test_the_default_number_of_rows_is_the_one_that_pays_by_the_estimates() -> None:
    """Those of docs/gpu.md for a Llama-3.1-8B on an H200: bytes at nine tenths of the bandwidth,
    and a microsecond for each kernel."""

    def estimate(rows: int) -> float:
        megabytes = 15_010 + 1024 * 32 * 2 * 8 * 128 * 2 / 1e6 * rows
        return megabytes / (0.9 * 4300) + 0.337

    assert estimate(256) == pytest.approx(13.3, abs=0.5)
    assert rows_that_pay(decode_rows(estimate)) == SchedulerOptions().max_running_requests


def test_what_no_time_is_left_for_is_left_out_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    def runs_out_of_time() -> str:
        report.started -= 100.0
        return "measured"

    report = Report({"device": "a GPU"}, budget_s=50.0)
    assert report.measure({"decode": runs_out_of_time, "idle": list}) == {"decode": "measured"}
    assert capsys.readouterr().out == "[  100 s] idle is left out: no time left\n"
    limits = {"copy_bytes_per_s": 4e12, "matmul_flops": 8e14}
    told = table(report.results | {"limits": limits, "models": {"tiny": {}}})
    assert "tiny: decode" in told


def test_figures_stand_under_their_titles_and_what_there_is_none_of_is_a_dash() -> None:
    row = {"prefix": 2048, "new": 512, "tflops": 431.25, "sdpa_tflops": None, "of_sdpa": None}
    limits = {"copy_bytes_per_s": 4e12, "matmul_flops": 8e14}
    machine = {"device": "a GPU"}
    told = table(
        {"machine": machine, "limits": limits, "models": {}, "extend_attention": [row]}
    ).splitlines()
    at = told.index("extend attention")
    assert told[at + 1].split() == ["prefix", "new", "TFLOP/s", "flash", "share"]
    assert told[at + 2].split() == ["2048", "512", "431.2", "-", "-"]
    assert len(told[at + 1]) == len(told[at + 2])


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_says_so_in_one_line_and_exits_2() -> None:
    done = gpu_check()
    assert done.returncode == 2
    assert len(done.stdout.splitlines()) == 1
    assert "no CUDA device" in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
def test_a_tiny_run_checks_and_measures_everything(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    done = gpu_check("--device", "cpu", "--tiny", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    results = json.loads(path.read_text())
    verdicts = {check["name"]: check["passed"] for check in results["checks"]}
    assert [name for name, passed in verdicts.items() if passed is None] == [
        "slots past 2**31 elements"
    ]
    assert False not in verdicts.values()
    for part in (
        "extend_attention d128",
        "extend_attention d64 g24 window and cap",
        "decode_attention d256 g4 soft cap small",
        "decode_attention d128 g4 300 keys",
        "extend_attention d128 g4 plain int8",
        "decode_attention d64 g3 window fp8",
        "mixed_attention d64 g3 window fp8",
        "store_kv as int8",
        "place_heads as fp8",
        "causal_conv",
        "gated_delta",
        "rotary",
        "sample top-p",
        "experts of a token alone",
        "int4 layer with zeros: the same in any step",
        "fp8 layer",
        "sample greedy with bias, penalties, bans and masks",
        "graph of 32 tokens replays 1 decode rows",
        "build_runner: starts",
        "build_runner: memory",
    ):
        assert any(name.startswith(part) for name in verdicts)
    for part in ("graph of 4 replays 3 rows", "tokens with no overlap", "teacher forcing"):
        assert part in verdicts
    assert {row["op"] for row in results["ops"]} >= {"rms_norm", "rotary", "sample greedy"}
    assert [row["tokens"] for row in results["experts"]] == [3]
    assert [row["kind"] for row in results["integers"]] == ["int4", "int8", "fp8", "nf4", "mxfp4"]
    measured = results["models"]["tiny"]
    assert [row["batch"] for row in measured["decode"]] == [1, 2, 4]
    assert measured["rows_that_pay"] in (1, 2, 4)
    assert "--max-running-requests is 256 by default" in done.stdout
    assert set(measured["idle"]) == {"overlap", "synchronous"}
    assert [row["sampling"] for row in measured["served"]] == [
        "greedy",
        "temperature",
        "top-p",
        "penalties",
    ]
    assert all(row["host_ms"] > 0 and row["device_ms"] > 0 for row in measured["mixed"])
    assert measured["offline"]["requests"] == 3
    assert "x floor" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("all results:")
