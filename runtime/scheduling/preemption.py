"""Preemption: a waiting request of much higher priority takes the place of running ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.scheduling.kv_memory import Releasable
from runtime.scheduling.victims import preemption_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.request import Request
    from runtime.scheduling.kv_memory import KVMemory


def choose_preempted(
    candidate: Request,
    admitted: Sequence[Request],
    memory: KVMemory,
    *,
    threshold: int,
    rows_missing: int,
    tokens_missing: int,
    reserved: dict[str, int],
) -> list[Request]:
    """The fewest victims whose places and tokens let the candidate in; none where even all of
    them would not do.

    Args:
        admitted: running requests and the pending chunk.
        threshold: how much lower a victim's priority must be, and more.
        rows_missing, tokens_missing: what keeps the candidate out; at least one is positive.
        reserved: by request id, tokens of the forecast that fall away with it.
    """
    victims: list[Request] = []
    forecast = 0
    released = Releasable(memory)
    for victim in preemption_order(admitted, candidate.priority, threshold):
        victims.append(victim)
        forecast += reserved.get(victim.request_id, 0)
        freed = released.add(victim) + forecast
        if len(victims) >= rows_missing and freed >= tokens_missing:
            return victims
    return []
