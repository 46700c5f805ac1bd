"""What stands in front of engines, from PyPI, in environments of their own that are kept between runs."""

from __future__ import annotations

import functools
import site
import sys
import tempfile
import venv
from pathlib import Path

from tests.clients.environment import NoIndex, install
from tests.missing import missing

ROUTERS = ("sglang-router==0.3.2", "vllm-router==0.1.17")
RAY = ("ray[serve]==2.60.0",)


@functools.cache
def router_bin() -> Path:
    """The folder of the routers' commands; skips where the package index cannot be reached."""
    return _environment(ROUTERS)


@functools.cache
def ray_bin() -> Path:
    """The folder of Ray's commands, in an environment that has what engines need, too."""
    folder = _environment(RAY)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    ours = folder.parent / "lib" / version / "site-packages" / "of_the_tests.pth"
    ours.write_text("\n".join(site.getsitepackages()) + "\n")
    return folder


def _environment(requirements: tuple[str, ...]) -> Path:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    name = "-".join((*requirements, version))
    folder = Path(tempfile.gettempdir()) / "loomserve-test-routers" / name
    done = folder / "installed"
    if not done.exists():
        venv.create(folder, with_pip=False, clear=True)
        try:
            install(folder / "bin" / "python", "--no-compile", *requirements)
        except NoIndex as error:
            missing(f"pip cannot reach a package index: {error}")
        done.touch()
    return folder / "bin"
