"""A certificate, and both event loops, for tests of connections."""

from __future__ import annotations

import asyncio
import shutil
import subprocess

import pytest
import uvloop


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


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request):
    """Runs a coroutine on the loop that tests have by default, and on the one that serves."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run
