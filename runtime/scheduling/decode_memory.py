"""DecodeMemory: room for the next token of every running row, and what to do without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.scheduling.kv_memory import Releasable
from runtime.scheduling.victims import retraction_order

if TYPE_CHECKING:
    from runtime.request import Request
    from runtime.scheduling.lifecycle import Lifecycle


class DecodeMemory:
    """The check of every pass that carries running rows.

    Args:
        life: the rows, and the KV they need.
    """

    def __init__(self, life: Lifecycle) -> None:
        self._life = life
        self._memory = life.memory

    def fits(self) -> bool:
        """Whether the pages of the running rows' next step are free or can be evicted."""
        return self._memory.new_page_tokens(self._life.running) <= self._memory.available_tokens

    def retract(self, now: float) -> tuple[list[Request], Request | None]:
        """Sends as few requests back into the queue as make the others' next step fit, one at
        least. No step may be in flight.

        Returns: those, and the one to end with an error: the last one left, if not even it can
            get its page.
        """
        victims, hopeless = self.choose_victims()
        for request in victims:
            self._life.retract(request, now)
        return victims, hopeless

    def choose_victims(self) -> tuple[list[Request], Request | None]:
        """Whom `retract` would take, in order. Changes nothing."""
        staying = list(self._life.running)
        victims: list[Request] = []
        released = Releasable(self._memory)
        for victim in retraction_order(self._life.admitted):
            victims.append(victim)
            staying = [request for request in staying if request is not victim]
            room = self._memory.available_tokens + released.add(victim)
            if self._memory.new_page_tokens(staying) <= room:
                return victims, None
        return victims, staying[0] if staying else None
