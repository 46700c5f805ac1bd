"""Ten client libraries as their users use them, in an environment of their own, on a live server.

Each script in `uses` streams, calls tools, asks for structured output, goes on for a second turn
and does so asynchronously, and compares what its library gives with what the model was told to
say. Where no package index can be reached, the tests are skipped and say so.
"""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.clients.environment import NoIndex, python_with_clients
from tests.missing import missing
from tests.server.server_kit import CHATML_TOOLS, sim_server

USES = sorted(Path(__file__).with_name("uses").glob("use_*.py"))
PATIENCE_S = 180.0
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    try:
        return python_with_clients(tmp_path_factory.mktemp("environments"))
    except NoIndex as error:
        missing(f"pip cannot reach a package index: {error}")


@pytest.fixture(scope="module")
def server():
    with sim_server(CHATML_TOOLS, reasoning_parser="qwen3", context_length=32768) as served:
        yield served


@pytest.fixture(scope="module")
def runs(python, server, tmp_path_factory):
    """What each script ended with; two run at a time, since most of it is importing."""

    def run(script: Path) -> subprocess.CompletedProcess[str]:
        # Their caches and settings are theirs, and nothing of ours is imported.
        home = tmp_path_factory.mktemp(script.stem)
        return subprocess.run(
            [python, script, server.url, server.model],
            env={"HOME": str(home), "PATH": os.environ["PATH"], "NO_PROXY": "127.0.0.1"},
            cwd=home,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
        )

    with ThreadPoolExecutor(2) as pool:
        yield {script: pool.submit(run, script) for script in USES}


def test_there_are_ten():
    assert len(USES) == 10


@pytest.mark.parametrize("script", USES, ids=lambda path: path.stem.removeprefix("use_"))
def test_each_library_gets_what_it_asks_for(runs, script):
    done = runs[script].result()
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("passed: ") >= 4, done.stdout
