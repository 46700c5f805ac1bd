"""What the tests of the server share: servers, and a certificate."""

from __future__ import annotations

import functools
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from server.formats import model_format
from server.formats.template_traits import find_traits
from tests.process.server_process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.server.server_kit import Served

# What a test does not use it does not import: the official clients take two seconds.


@pytest.fixture(scope="session", autouse=True)
def traits_are_found_once():
    """What a chat template takes: thirty renderings for each server, all of the same template."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_format, "find_traits", functools.cache(find_traits))
        yield


@pytest.fixture(scope="session")
def sim() -> Iterator[Served]:
    """A simulated model whose chat template knows no tools."""
    from tests.server.server_kit import sim_server

    with sim_server() as served:
        yield served


@pytest.fixture(scope="session")
def thinker() -> Iterator[Served]:
    """A simulated model whose chat template knows tools, and which reasons in <think> marks."""
    from tests.server.server_kit import CHATML_TOOLS, sim_server

    with sim_server(CHATML_TOOLS, reasoning_parser="qwen3") as served:
        yield served


@pytest.fixture(scope="session")
def real() -> Iterator[Served]:
    """The embedded model, in a process of its own."""
    from tests.server.server_kit import Served

    with ServerProcess("--port", "0", "--dtype", "bfloat16") as process:
        url = process.url()
        served = Served(url)
        served.model = served.openai.models.list().data[0].id
        yield served
        served.close()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """Files of a certificate for 127.0.0.1 and of its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key
