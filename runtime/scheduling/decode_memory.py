"""DecodeMemory: room for the next token of every running row, and what to do without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.scheduling.victims import retraction_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.request import Request
    from runtime.scheduling.kv_memory import KVMemory


class DecodeMemory:
    """The check of every pass that carries running rows."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory

    def fits(self, running: Sequence[Request]) -> bool:
        """Whether the next step's pages are free or can be evicted."""
        return self._memory.new_page_tokens(running) <= self._memory.available_tokens

    def choose_victims(
        self, running: Sequence[Request], chunked: Request | None
    ) -> tuple[list[Request], Request | None]:
        """Whom to retract so that the others' next step fits. No step may be in flight.

        Returns:
            The requests to retract, in order, and the one to end with an error: the last one
            left, if not even it can get its page.
        """
        staying = list(running)
        victims: list[Request] = []
        admitted = [*running, chunked] if chunked is not None else running
        for victim in retraction_order(admitted):
            victims.append(victim)
            if victim in staying:
                staying.remove(victim)
            room = self._memory.available_tokens + self._memory.releasable_tokens(victims)
            if self._memory.new_page_tokens(staying) <= room:
                return victims, None
        return victims, staying[0] if staying else None
