"""Bounds on JSON: how deep, so that nothing that walks it runs out of stack, and how much of it,
since a parser lets nobody else run (measured for the bounds: 3 to 10 ms)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterator

# Deeper than any schema or tool needs.
MAX_DEPTH = 100
# orjson writes at most so many levels.
_ORJSON_DEPTH = 254
MAX_ITEMS = 200_000  # as many token ids as a prompt may have
MAX_NODES = 60_000
_NODES = b":[{"
_SLICE = 65_536


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


def is_too_much(data: bytes) -> bool:
    """Whether JSON text has more in it than is parsed at once."""
    items, nodes = size_of(data)
    return items > MAX_ITEMS or nodes > MAX_NODES


def size_of(data: bytes) -> tuple[int, int]:
    """(commas; keys, lists and objects) of JSON text that was not parsed. They are counted by
    slices, between which other threads run."""
    items = nodes = 0
    for text in _slices(data):
        items += text.count(b",")
        nodes += len(text) - len(text.translate(None, _NODES))
    if items <= MAX_ITEMS and nodes <= MAX_NODES:
        return items, nodes  # in texts too: there is no need to look for them
    items = nodes = inside = 0
    for text in _slices(data):
        parts = text.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[inside::2])
        items += outside.count(b",")
        nodes += len(outside) - len(outside.translate(None, _NODES))
        inside ^= len(parts) % 2 == 0
    return items, nodes


def _slices(data: bytes) -> Iterator[bytes]:
    """Pieces of JSON text, none of which ends between a backslash and what it escapes."""
    begin = 0
    while begin < len(data):
        end = begin + _SLICE
        text = data[begin:end]
        if (len(text) - len(text.rstrip(b"\\"))) % 2:
            end += 1
            text = data[begin:end]
        yield text
        begin = end
