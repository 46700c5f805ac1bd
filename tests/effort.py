"""How much tests try: everything in the whole run, a part of it in the fast loop.

The fast loop leaves out what is slow, runs some cases of what is marked `sampled`, and tries fewer
of what is drawn at random. The cases and draws that it does run are always the same ones.
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pytest

T = TypeVar("T")

fast = False  # set by conftest.py before any test is read


def tries(whole: int) -> int:
    """How many of something random to try: `whole`, or a fifth of it in the fast loop."""
    return max(1, whole // 5) if fast else whole


def some(cases: Iterable[T]) -> Iterator[T]:
    """The cases, in the fast loop every fifth of them."""
    return itertools.islice(cases, 0, None, 5 if fast else 1)


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The cases that the fast loop does not run, of tests marked `sampled(N)`: all but N."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    out = []
    for name, of_one in cases.items():
        mark = of_one[0].get_closest_marker("sampled")
        assert mark is not None
        (count,) = mark.args
        spared = max(0, len(of_one) - count)
        out += random.Random(name).sample(of_one, spared)
    return out
