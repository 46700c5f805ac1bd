"""A server started with --record leaves a trace that replays to the byte and can be simulated."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from typing import TYPE_CHECKING

import aiohttp
import pytest

from runtime.simulation.live_run import read_live_run
from runtime.simulation.trace import read_trace
from tests.process.server_process import ROOT, ServerProcess

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow
REQUESTS = 40


async def completion(client: aiohttp.ClientSession, url: str, draw: random.Random) -> int:
    """Tokens that came before the client was done, or had enough."""
    body = {
        "prompt": [draw.randrange(3, 250) for _ in range(draw.choice((5, 40, 300)))],
        "max_tokens": draw.choice((3, 30, 120)),
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": 1,
        "stream": True,
    }
    leaves_after = 4 if draw.random() < 0.2 else 10_000
    count = 0
    async with client.post(f"{url}/v1/completions", json=body) as answer:
        async for line in answer.content:
            count += line.startswith(b"data: {")
            if count >= leaves_after:
                break
    return count


async def load(url: str) -> list[int]:
    draw = random.Random(5)
    async with aiohttp.ClientSession() as client:
        waves = [asyncio.create_task(completion(client, url, draw)) for _ in range(REQUESTS)]
        counts = await asyncio.gather(*waves)
        async with client.post(f"{url}/flush_cache") as answer:
            await answer.read()
    return counts


@pytest.fixture(scope="module")
def trace_file(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    path = folder / "trace.jsonl"
    options = (
        "--model", str(tiny_model), "--port", "0", "--cache-dir", str(folder / "cache"),
        "--cpu-kernels", "torch", "--max-total-tokens", "1536", "--chunked-prefill-size", "64",
        "--max-running-requests", "12", "--record", str(path),
    )  # fmt: skip
    with ServerProcess(*options) as server:
        counts = asyncio.run(load(server.url()))
        assert all(counts)
        server.terminate()
        assert server.exit_status() == 0, server.output
    return path


def replay(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "replay.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_live_server_is_replayed_to_the_byte(trace_file: Path) -> None:
    done = replay(str(trace_file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all the same" in done.stdout


def test_changed_option_is_named_where_it_first_shows(trace_file: Path) -> None:
    done = replay(str(trace_file), "--set", "chunked_prefill_size=32")
    assert done.returncode == 1
    assert "batch.extend_lens" in done.stdout


def test_live_server_can_be_asked_what_if(trace_file: Path) -> None:
    run = read_live_run(read_trace(trace_file))
    assert len(run.arrivals) == REQUESTS
    assert any(arrival.abort_after_s is not None for arrival in run.arrivals)
    command = [
        sys.executable, str(ROOT / "scripts" / "simulate.py"), "--live", str(trace_file),
        "--what-if", "disable_mixed_chunk=true",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "disable_mixed_chunk=true" in done.stdout


def test_unwritable_file_is_told_before_serving(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "no" / "such" / "folder.jsonl"
    options = (
        "--model", str(tiny_model), "--port", "0", "--cache-dir", str(tmp_path / "cache"),
        "--cpu-kernels", "torch", "--record", str(path),
    )  # fmt: skip
    with ServerProcess(*options) as server:
        assert server.exit_status() == 2
        server.wait_for(r"record .*cannot be written")
