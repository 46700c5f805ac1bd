"""A bound on a model's reasoning: after so many tokens of it, its end mark is all that may come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from server.grammars.bits import allow_only

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from runtime.errors import LoomserveError
    from server.generation.output import Matcher


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """Tokens of the reasoning at most, and the request's field that says so."""

    tokens: int
    param: str


class ThinkingBudget:
    """The matcher of a request whose reasoning is bounded, around that of its grammar, if it has
    one. A grammar leaves the reasoning free, and so takes its end wherever that comes.

    Like every matcher it follows committed tokens only.

    Args:
        most: tokens between the marks.
        start, end: ids of the marks; None: the model has no such token, so it does not begin.
        inside: the prompt has begun the reasoning.
        inner: follows the request's grammar; None: it has none.
    """

    __slots__ = ("_end", "_inner", "_inside", "_left", "_start")

    def __init__(
        self, most: int, start: int | None, end: int, *, inside: bool, inner: Matcher | None
    ) -> None:
        self._left = most
        self._start, self._end = start, end
        self._inside = inside
        self._inner = inner

    @property
    def failed(self) -> LoomserveError | None:
        return None if self._inner is None else self._inner.failed

    @property
    def refused(self) -> LoomserveError | None:
        return None if self._inner is None else self._inner.refused

    @property
    def ready(self) -> bool:
        return self._inner is None or self._inner.ready

    def start(self, when_known: Callable[[], None]) -> None:
        if self._inner is not None:
            self._inner.start(when_known)

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()

    def fill_mask(self, bits: NDArray[np.int32]) -> None:
        if self._inner is not None:
            self._inner.fill_mask(bits)
        if self._inside and self._left <= 0 and self.failed is None:
            allow_only(bits, self._end)

    def accept(self, token_id: int) -> None:
        if self._inner is not None:
            self._inner.accept(token_id)
        if token_id == self._end:
            self._inside = False
        elif self._inside:
            self._left -= 1
        elif token_id == self._start:
            self._inside = True

    def is_terminated(self) -> bool:
        return self._inner is not None and self._inner.is_terminated()
