"""Reading the JSON files of a model folder, which anybody may have written."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from runtime.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file. Raises: ModelError: unreadable, not JSON, or not an object."""
    try:
        return parse_json_object(path.read_bytes(), str(path))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None


def read_optional_json_object(path: Path) -> dict[str, Any]:
    """As `read_json_object`; empty where there is no such file."""
    return read_json_object(path) if path.exists() else {}


def parse_json_object(data: bytes, name: str) -> dict[str, Any]:
    """The object that `data` spells. Raises: ModelError: it spells none; begins with `name`."""
    try:
        content = json.loads(data)
    except RecursionError:
        raise ModelError(f"{name}: not valid JSON (nested too deeply)") from None
    except ValueError as error:
        raise ModelError(f"{name}: not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ModelError(f"{name}: must hold a JSON object")
    return content
