"""What was measured on a machine, kept beside the kernels that it was measured with."""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def place_of(library: Path, what: str, *named: Any) -> Path:
    """A file for a measurement with the library, of what is named: all that it follows from."""
    text = json.dumps([library.name, *named], sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return library.with_name(f"{what}-{digest}.json")


def recall(path: Path) -> Any:
    """What was kept; None where nothing can be read."""
    try:
        return json.loads(path.read_text("ascii"))
    except (OSError, ValueError, RecursionError):
        return None


def keep(path: Path, found: Any) -> None:
    """Whole or not at all; where it cannot be written, it is measured again at the next start."""
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        partial.write_text(json.dumps(found), "ascii")
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
