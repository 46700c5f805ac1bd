"""Everything that can go wrong, as types. The server maps them to statuses in one place."""

from __future__ import annotations

import reprlib
from itertools import islice
from typing import Any


class LoomserveError(Exception):
    """Base of all errors of this project."""


class ConfigError(LoomserveError):
    """An option, or a combination of options, that cannot be served; raised at start-up."""


class ModelError(LoomserveError):
    """A model folder or file that cannot be loaded; the message names the file and the reason."""


class InvalidRequest(LoomserveError):
    """A request that is wrong in itself (HTTP 400).

    Args:
        message: a sentence that names the field, what was given and what is allowed.
        param: the name of the field, as the client wrote it.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


_SHOWN_CHARACTERS = 80


class _Short(reprlib.Repr):
    """repr that looks at the first few items alone, however many there are, and that names what
    Python writes in another way than JSON as JSON does."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxlist, self.maxdict = 3, 8, 8
        self.maxstring = self.maxother = self.maxlong = _SHOWN_CHARACTERS

    def repr_str(self, value: str, level: int) -> str:
        return repr(value if len(value) <= self.maxstring else value[: self.maxstring] + "...")

    def repr_bool(self, value: bool, level: int) -> str:
        return "true" if value else "false"

    def repr_NoneType(self, value: None, level: int) -> str:
        return "null"

    def repr_dict(self, value: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(islice(value.items(), self.maxdict + 1)), level)


_short = _Short()


def shown(value: Any) -> str:
    """A value as error messages show it, cut short before it is written out."""
    text = _short.repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def wrong(name: str, value: Any, allowed: str) -> InvalidRequest:
    """The error for a field whose value is not what is allowed."""
    return InvalidRequest(f"{name}: got {shown(value)}, must be {allowed}", param=name)


def missing(name: str, allowed: str) -> InvalidRequest:
    """The error for a field that must be there and is not, or is null."""
    return InvalidRequest(f"{name}: is missing; must be {allowed}", param=name)


class ContextTooLong(InvalidRequest):
    """Prompt and requested output cannot fit the context or the KV pool (HTTP 400)."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class QueueFull(LoomserveError):
    """The waiting queue is at its cap (HTTP 503).

    Args:
        retry_after_s: when a retry has a chance.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDead(LoomserveError):
    """The step loop has ended; nothing can be served any more (HTTP 503)."""


class ModelNotFound(LoomserveError):
    """A model that this server does not serve (HTTP 404)."""


class GenerationFailed(LoomserveError):
    """A request that was begun and cannot be completed (HTTP 500; 504 where time ran out)."""

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class InvariantError(LoomserveError):
    """A recount found the scheduler's books wrong. Always a bug of ours."""
