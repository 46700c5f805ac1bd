"""One tiny model for all tests of this folder."""

from __future__ import annotations

import pytest

from tests.process.server_process import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def options(tiny_model, tmp_path):
    """Options that every server here is started with; its cache is the test's own."""
    return (
        "--model",
        str(tiny_model),
        "--port",
        "0",
        "--cache-dir",
        str(tmp_path / "cache"),
        "--cpu-kernels",
        "torch",
    )
