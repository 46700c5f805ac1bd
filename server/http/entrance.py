"""How many requests begin in one turn of the event loop.

A thousand requests that arrive together would all be read in one turn, a second long, in which
nobody else is heard. So only a few begin in each, clients in turn; between two turns the loop looks
at its sockets again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

# Reading a short request, and what it asks of the output, takes up to 1 ms.
A_TURN = 16


class Entrance:
    """Requests whose bodies have come, on their way to their handlers."""

    def __init__(self) -> None:
        self._left = A_TURN
        self._next_turn: asyncio.Handle | None = None
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def begin(self, client: str) -> None:
        """Waits for a turn in which one more request may begin."""
        loop = asyncio.get_running_loop()
        if self._next_turn is None:
            self._next_turn = loop.call_soon(self._turn)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        await turn

    def _turn(self) -> None:
        self._left = A_TURN
        while self._left and self._waiting:
            client, turns = next(iter(self._waiting.items()))
            turn = turns.popleft()
            if turns:
                self._waiting.move_to_end(client)
            else:
                del self._waiting[client]
            if not turn.done():  # who has left needs none
                turn.set_result(None)
                self._left -= 1
        begun = self._left < A_TURN
        loop = asyncio.get_running_loop()
        self._next_turn = loop.call_soon(self._turn) if begun else None
