"""The black-box cases of http_cases.py against servers in processes of their own: none fails, with
points of taste counted as failures and every pair of greedy texts compared to the character."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.server_process import ServerProcess, write_tiny_model

CASES = Path(__file__).with_name("http_cases.py")

pytestmark = pytest.mark.slow


def run_cases(url: str, *options: str) -> str:
    """The report; asserts that no case failed."""
    command = [sys.executable, str(CASES), "--base-url", url, "--strict", "--min-same", "1"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_cases_with_the_default_model():
    with ServerProcess("--port", "0", "--cors-allow-origins", "*") as server:
        report = run_cases(server.url())
        server.terminate()
        assert server.exit_status() == 0
    assert " 0 skipped" in report


def test_cases_with_a_model_that_has_no_chat_template(tmp_path):
    model = write_tiny_model(tmp_path / "tiny-llama")
    for file in (model / "tokenizer_config.json", model / "chat_template.jinja"):
        if file.exists():
            text = file.read_text()
            file.write_text(text.replace('"chat_template"', '"no_template"'))
            if file.suffix == ".jinja":
                file.unlink()
    options = ("--model", str(model), "--port", "0", "--cpu-kernels", "torch")
    with ServerProcess(*options, "--dtype", "float32") as server:
        # E08 tokenizes an answer to find its first id. This model, of random weights over bytes,
        # answers with broken characters, and U+FFFD is tokenized as three other bytes.
        report = run_cases(server.url(), "--skip", "E08")
    assert "PASS F04" in report
    assert "endpoints=completions " in report
