"""The version of this installation."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    try:
        return importlib.metadata.version("loomserve")
    except importlib.metadata.PackageNotFoundError:  # run from a folder, never installed
        return "unknown"
