"""A small mistake to plant, and where things are that many of them name."""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULING = "runtime/scheduling"
EXECUTION = "runtime/execution"


@dataclass(frozen=True, slots=True)
class Plant:
    """A mistake. old: stands in the file exactly once."""

    area: str
    file: str
    old: str
    new: str


def planted(area: str, file: str, *changes: tuple[str, str]) -> list[Plant]:
    """Mistakes of one file. changes: what stands there, and what is put in its place."""
    return [Plant(area, file, old, new) for old, new in changes]
