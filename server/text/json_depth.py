"""A bound on how deeply JSON is nested, so that nothing that walks it runs out of stack."""

from __future__ import annotations

from typing import Any

import orjson

# Deeper than any schema or tool needs.
MAX_DEPTH = 100
# orjson writes at most so many levels.
_ORJSON_DEPTH = 254


def is_deeper(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether a value that orjson read is nested more deeply. Found by writing it inside so many
    lists that orjson refuses just then: that costs no walk in Python."""
    for _ in range(_ORJSON_DEPTH - depth):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return True
    return False
