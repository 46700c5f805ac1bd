"""Files that only their owner can read: prompts, or what tells of them, stand in them."""

from __future__ import annotations

import os
import stat


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """An opener for `open`."""
    descriptor = os.open(path, flags, 0o600)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):  # it may have been there, with other rights
        os.fchmod(descriptor, 0o600)
    return descriptor
