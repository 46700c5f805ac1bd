"""What the simulator's page runs: Pyodide in the cache, checked, and the scheduler's sources."""

from __future__ import annotations

import base64
import hashlib
import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from runtime.config import RunnerConfig
from runtime.errors import LoomserveError
from server import simulator_files
from server.simulator_files import PYODIDE_FILES, fetch_pyodide, packed_sources, pyodide_folder
from tests.fakes import fake_server


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in a cache folder that takes the place of npm's, with one file more than is
    needed."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in (*PYODIDE_FILES, "console.html"):
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content := f"this is {name}".encode())
            archive.addfile(member, io.BytesIO(content))
    content = buffer.getvalue()
    digest = base64.b64encode(hashlib.sha512(content).digest()).decode()
    monkeypatch.setattr(simulator_files, "INTEGRITY", f"sha512-{digest}")
    (path := tmp_path / simulator_files.PACKAGE).write_bytes(content)
    return path


def test_package_in_the_cache_is_taken_once_and_only_what_is_needed_of_it(package: Path) -> None:
    said: list[str] = []
    folder = fetch_pyodide(package.parent, said.append)
    assert folder == pyodide_folder(package.parent)
    assert sorted(path.name for path in folder.iterdir()) == sorted(PYODIDE_FILES)
    assert (folder / "pyodide.mjs").read_bytes() == b"this is pyodide.mjs"
    package.unlink()
    assert fetch_pyodide(package.parent, said.append) == folder
    assert said == [], "nothing was downloaded"


def test_another_package_than_the_one_published_is_refused(package: Path) -> None:
    package.write_bytes(package.read_bytes() + b"\0")
    with pytest.raises(LoomserveError, match=r"has the hash sha512-.*, and must have sha512-"):
        fetch_pyodide(package.parent, print)
    assert not pyodide_folder(package.parent).exists()


def test_failed_download_names_the_address(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(simulator_files, "URL", "http://127.0.0.1:9/pyodide.tgz")
    from server.__main__ import main

    assert main(["fetch-pyodide", "--cache-dir", str(tmp_path)]) == 1
    assert "http://127.0.0.1:9/pyodide.tgz: cannot be downloaded" in capsys.readouterr().err


def test_packed_sources_run_by_themselves(tmp_path: Path) -> None:
    """In a Python that finds nothing but them and the standard library."""
    with zipfile.ZipFile(io.BytesIO(packed_sources())) as archive:
        archive.extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "from runtime.simulation.what_if import Session\n"
        "session = Session()\n"
        'session.load(\'{"workloads": [{"requests": 3}]}\')\n'
        "session.start('{}')\n"
        "print(session.advance(10**6)[:12])\n"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.stdout == '{"done":true\n', run.stderr


async def test_files_are_served_to_those_without_a_key_too(package: Path) -> None:
    device = RunnerConfig(cache_dir=str(package.parent))
    async with fake_server(api_key="secret", device=device) as server:
        assert (await server.get("/simulator/setup"))[1]["pyodide"] is False
        assert (await server.get("/simulator/pyodide/pyodide.mjs"))[0] == 404
        fetch_pyodide(package.parent, print)
        assert (await server.get("/simulator/setup"))[1] == {
            "pyodide": True,
            "command": "loomserve fetch-pyodide",
            "records": False,
        }
        for name, media in PYODIDE_FILES.items():
            async with server.client.get(f"{server.url}/simulator/pyodide/{name}") as answer:
                assert await answer.read() == f"this is {name}".encode()
                assert answer.headers["Content-Type"] == media
        for name in ("console.html", "..%2f..%2fsecret", "%2e%2e", "."):
            assert (await server.get(f"/simulator/pyodide/{name}"))[0] == 404
        async with server.client.get(f"{server.url}/simulator/sources.zip") as answer:
            assert await answer.read() == packed_sources()
        async with server.client.get(f"{server.url}/simulator") as answer:
            assert "worker-src 'self'" in answer.headers["Content-Security-Policy"]
        worker = f"{server.url}/page/simulator/worker.js"
        async with server.client.get(worker) as answer:
            assert "'wasm-unsafe-eval'" in answer.headers["Content-Security-Policy"]
