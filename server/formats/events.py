"""What an answer consists of, piece by piece, whatever protocol carries it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Text:
    """More of what is said to the reader."""

    text: str


@dataclass(slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(slots=True)
class CallStart:
    """A tool call begins; the calls of an answer are numbered from 0."""

    index: int
    call_id: str
    name: str


@dataclass(slots=True)
class CallArguments:
    """A further piece of a call's arguments, which together are JSON text."""

    index: int
    text: str


Event = Text | Reasoning | CallStart | CallArguments
