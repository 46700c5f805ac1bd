"""Where a server without options keeps compiled kernels and the embedded model: tests share them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.args import parse_args

if TYPE_CHECKING:
    from pathlib import Path


def cache_folder() -> Path:
    return parse_args([]).runner.cache_folder
