"""A report of two servers shows what they are known to differ in."""

from __future__ import annotations

import pytest

from server.bench.options import parse
from server.bench.report import Measured, html_report
from server.bench.run import run_load
from tests.fakes import fake_runner, fake_server

CHUNK = 64
STEP_S = 0.012


def new_runner():
    """Every step takes 12 ms, whatever it computes."""
    return fake_runner(step_seconds=lambda batch: STEP_S)


@pytest.mark.slow
async def test_mixed_chunks_shorten_the_largest_gap_of_running_streams(tmp_path):
    """Four streams run when a prompt of some 30 chunks arrives. In strict order they wait for all
    of its steps, at least; with mixed chunks they have a token in each."""
    path = tmp_path / "trace.csv"
    small = "2024-01-01 00:00:00,4,100\n"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n" + 4 * small + "2024-01-01 00:00:00.3,380,2\n"
    )
    words = ["--workload", "azure", "--file", str(path), "--ignore-eos"]
    runs = []
    for strict_order in (True, False):
        scheduler = {"disable_mixed_chunk": strict_order, "chunked_prefill_size": CHUNK}
        async with fake_server(
            runner=new_runner(), scheduler=scheduler, context_length=4096
        ) as server:
            options = parse([*words, "--base-url", server.url])
            runs.append(await run_load(options.target, options.load))
    strict, mixed = runs
    assert all(answer.ok for run in runs for answer in run.answers)
    chunks = strict.answers[-1].prompt_tokens // CHUNK
    assert chunks > 25
    measured = Measured([("strict", strict), ("mixed", mixed)], pairs=[(strict, mixed)])
    ratio = measured.ratios()["itl_ms.max"]["median"]
    assert strict.summary()["itl_ms"]["max"] >= 0.8 * chunks * STEP_S * 1e3
    assert ratio < 0.5
    assert f"itl_ms.max</td><td>{ratio:.4g}" in html_report(measured, "0")
    assert max(sample.running or 0 for sample in mixed.samples) >= 4
