"""Servers that the tests of the API share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.process.server_process import ServerProcess
from tests.server.server_kit import CHATML_TOOLS, Served, sim_server

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def sim() -> Iterator[Served]:
    """A simulated model whose chat template knows no tools."""
    with sim_server() as served:
        yield served


@pytest.fixture(scope="session")
def thinker() -> Iterator[Served]:
    """A simulated model whose chat template knows tools, and which reasons in <think> marks."""
    with sim_server(CHATML_TOOLS, reasoning_parser="qwen3") as served:
        yield served


@pytest.fixture(scope="session")
def real() -> Iterator[Served]:
    """The embedded model, in a process of its own."""
    with ServerProcess("--port", "0") as process:
        url = process.url()
        served = Served(url)
        served.model = served.openai.models.list().data[0].id
        yield served
        served.close()
