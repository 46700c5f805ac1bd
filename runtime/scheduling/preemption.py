"""Preemption: a waiting request of much higher priority takes the place of running ones.

Who would have to go is found by trying: the candidate is admitted, by the rules of admission
themselves, into what would be there without some of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.scheduling.kv_memory import Releasable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runtime.request import Request
    from runtime.scheduling.kv_memory import KVMemory
    from runtime.scheduling.radix_tree import Node


class WithoutVictims:
    """The pool as a `PrefillAdder` would see it, had some requests been released.

    Args:
        memory: the pool as it is; changed by locks alone.
    """

    def __init__(self, memory: KVMemory, victims: Sequence[Request]) -> None:
        self._memory = memory
        self._victims = victims
        self._count()

    def _count(self) -> None:
        # Anew with every lock: what a victim shares with the candidate does not become available.
        released = Releasable(self._memory)
        for victim in self._victims:
            released.add(victim)
        self.available_tokens = self._memory.available_tokens + released.tokens

    def lock(self, node: Node | None) -> None:
        """Keeps a matched prefix."""
        self._memory.lock(node)
        self._count()

    def unlock(self, node: Node | None) -> None:
        self._memory.unlock(node)
        self._count()


def fewest_victims(
    order: Sequence[Request], least: int, admits: Callable[[Sequence[Request]], bool]
) -> list[Request]:
    """The shortest beginning of `order` that lets the candidate in; none where even all of it
    would not do.

    Args:
        order: whom to take first.
        least: victims that are needed at any rate, one or more.
        admits: whether the candidate would be admitted without these; more of them never hurt.
    """
    if least > len(order) or not admits(order):
        return []
    low, high = least, len(order)
    while low < high:
        middle = (low + high) // 2
        if admits(order[:middle]):
            high = middle
        else:
            low = middle + 1
    return list(order[:high])
