"""An environment of its own for the client libraries, whose dependencies are not the server's."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
# Names a folder in which environments are kept between runs.
CACHE_VARIABLE = "LOOMSERVE_CLIENTS_CACHE"
# What pip says where it reaches no index, as opposed to one that lacks a release.
_NO_INDEX = ("NewConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ProxyError",
             "Temporary failure in name resolution", "Could not connect")  # fmt: skip
INSTALL_TIMEOUT_S = 600.0


class NoIndex(Exception):
    """The package index cannot be reached."""


def python_with_clients(scratch: Path) -> Path:
    """The Python of an environment that has the libraries; made where there is none yet.

    Args: scratch: where it is made unless the cache's variable names a folder.
    Raises: NoIndex. RuntimeError: the libraries cannot be installed for another reason.
    """
    named = os.environ.get(CACHE_VARIABLE)
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    version = "".join(map(str, sys.version_info[:2]))
    folder = Path(named or scratch) / f"clients-{version}-{digest}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        # Without compiling: most of the modules are never imported.
        install(python, "--no-deps", "--no-compile", "--requirement", str(REQUIREMENTS))
        (folder / "complete").touch()
    return python


def install(python: Path, *words: str) -> None:
    """Has pip install into the environment of a Python, which has no pip of its own.

    Args: words: options and requirements.
    Raises: NoIndex. RuntimeError: they cannot be installed for another reason.
    """
    options = ("--disable-pip-version-check", "--retries", "2")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", *options, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
    )
    if done.returncode == 0:
        return
    told = "\n".join(done.stdout.splitlines()[-20:])
    raise NoIndex(told) if any(sign in done.stdout for sign in _NO_INDEX) else RuntimeError(told)
