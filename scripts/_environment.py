"""Makes the virtual environment that `scripts/serve` and `scripts/test` run in.

Standard library only: it runs before anything is installed. Called by `_environment.sh` with the
extras ("serve" or "test") and the text of the stamp; a lock lets concurrent first runs wait.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
TESTED = ROOT / "scripts" / "constraints.txt"  # written by scripts/audit --lock


def main() -> None:
    extras, wanted = sys.argv[1:]
    with (ROOT / ".venv.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another run is setting up .venv; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = VENV / f".loomserve-{extras}"
        if stamp.is_file() and stamp.read_text() == wanted and PYTHON.exists():
            return
        if not has_pip():
            say(f"making .venv with Python {sys.version.split()[0]}")
            run(sys.executable, "-m", "venv", "--clear", str(VENV))
        say("installing loomserve and what it needs into .venv (minutes the first time)")
        target = f"{ROOT}[test]" if extras == "test" else str(ROOT)
        install = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "-e", target]
        if not succeeds(*install, "--constraint", str(TESTED)):
            say(f"the versions of {TESTED.name} cannot be had here; taking what can be")
            run(*install)
        stamp.write_text(wanted)
        if extras == "test":
            (VENV / ".loomserve-serve").write_text(wanted)


def has_pip() -> bool:
    """Whether .venv is usable: an interrupted run may have left one without pip."""
    command = [str(PYTHON), "-m", "pip", "--version"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def run(*command: str) -> None:
    if not succeeds(*command):
        sys.exit(f"setting up .venv failed: {' '.join(command)}")


def succeeds(*command: str) -> bool:
    return subprocess.run(command, stdout=sys.stderr, check=False).returncode == 0


def say(message: str) -> None:
    print(f"loomserve: {message}", file=sys.stderr, flush=True)


main()
