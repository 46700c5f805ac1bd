"""What the simulator's page runs: Pyodide, fetched once into the cache, and the Python sources of
the scheduler, packed from this installation, so that the page runs the very code that serves.

Pyodide (CPython for browsers) comes as the npm registry's package, of one version, checked against
its published hash. Nothing of npm is needed for it.
"""

from __future__ import annotations

import base64
import hashlib
import io
import sys
import tarfile
import urllib.request
import zipfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import runtime.config
from runtime.checkpoints.cache_folder import build_once
from runtime.errors import LoomserveError

if TYPE_CHECKING:
    from collections.abc import Callable

    from server.config import ServerConfig

VERSION = "314.0.7"
# As the registry publishes it: dist.integrity of this version.
INTEGRITY = (
    "sha512-0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyM"
    "cWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
)
BYTES = 6_490_000
PACKAGE = f"pyodide-{VERSION}.tgz"
URL = f"https://registry.npmjs.org/pyodide/-/{PACKAGE}"
# All that the standard library needs; the package also has consoles, maps and types.
PYODIDE_FILES = {
    "pyodide.mjs": "text/javascript; charset=utf-8",
    "pyodide.asm.mjs": "text/javascript; charset=utf-8",
    "pyodide.asm.wasm": "application/wasm",
    "python_stdlib.zip": "application/zip",
    "pyodide-lock.json": "application/json",
}
# Of `runtime`: what runs without anything but the standard library, and the records it shares.
_SOURCES = (
    "config.py",
    "errors.py",
    "options.py",
    "percentiles.py",
    "private_files.py",
    "request.py",
    "runner.py",
)
_SOURCE_FOLDERS = ("scheduling", "simulation")
_TIMEOUT_S = 60.0


def pyodide_folder(cache_dir: Path) -> Path:
    """Where Pyodide lies, or would lie once it is fetched."""
    return cache_dir / f"pyodide-{VERSION}"


def fetch_pyodide(cache_dir: Path, progress: Callable[[str], None]) -> Path:
    """The folder with Pyodide in the cache, fetched if it is not there yet.

    A package of the right name that lies in `cache_dir` is taken instead of a download.

    Args: progress: told what is going on.
    Raises: ConfigError: the cache folder cannot be written. LoomserveError: the download failed, or
        is not the expected file.
    """

    def build(folder: Path) -> None:
        given = cache_dir / PACKAGE
        if given.is_file():
            content, origin = given.read_bytes(), str(given)
        else:
            progress(f"downloading {URL} ({BYTES / 1e6:.1f} MB)")
            content, origin = _download(), URL
        _check(content, origin)
        _unpack(content, folder)

    return build_once(pyodide_folder(cache_dir), build, progress)


def _download() -> bytes:
    try:
        with urllib.request.urlopen(URL, timeout=_TIMEOUT_S) as answer:
            content: bytes = answer.read()
    except OSError as error:
        raise LoomserveError(f"{URL}: cannot be downloaded: {error}") from error
    return content


def _check(package: bytes, origin: str) -> None:
    found = "sha512-" + base64.b64encode(hashlib.sha512(package).digest()).decode()
    if found != INTEGRITY:
        raise LoomserveError(f"{origin}: has the hash {found}, and must have {INTEGRITY}")


def _unpack(package: bytes, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        for name in PYODIDE_FILES:
            member = archive.extractfile(f"package/{name}")
            assert member is not None, name
            (folder / name).write_bytes(member.read())


def run_fetch(config: ServerConfig) -> int:
    """`loomserve fetch-pyodide`; returns the exit status."""
    try:
        folder = fetch_pyodide(config.runner.cache_folder, _tell)
    except LoomserveError as error:
        _tell(str(error))
        return 1
    _tell(f"the page at /simulator can run: {folder}")
    return 0


def _tell(text: str) -> None:
    print(f"loomserve: {text}", file=sys.stderr)


@cache
def packed_sources() -> bytes:
    """A zip of the scheduler, the simulation and what they import; the same bytes each time."""
    package = Path(runtime.config.__file__).parent
    files = [package / name for name in _SOURCES]
    files += [path for folder in _SOURCE_FOLDERS for path in (package / folder).glob("*.py")]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(files):
            name = str(Path("runtime") / path.relative_to(package))
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
