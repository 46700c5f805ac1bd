"""Decides whose grammar is compiled next, where many wait for few threads.

Clients take turns, so that a thousand schemas of one client do not delay the single one of
another. Of one client's schemas the shortest goes first: many clients may share an address, and a
long grammar takes 0.8 s, while most take one or two milliseconds.
"""

from __future__ import annotations

from collections import OrderedDict


class Turns:
    """Keys of grammars that wait, by client. One key may wait for several clients."""

    def __init__(self) -> None:
        self._of_client: OrderedDict[str, dict[str, int]] = OrderedDict()
        self._characters: dict[str, int] = {}

    def characters(self, client: str) -> int:
        """The characters of all grammars that wait for a client."""
        return self._characters.get(client, 0)

    def add(self, client: str, key: str, characters: int) -> None:
        """Adds a grammar of so many characters, unless it waits for this client already."""
        waiting = self._of_client.setdefault(client, {})
        if key not in waiting:
            waiting[key] = characters
            self._characters[client] = self.characters(client) + characters

    def take(self) -> str | None:
        """The key whose turn it is, which waits for nobody from here on; None where none waits."""
        if not self._of_client:
            return None
        client, waiting = next(iter(self._of_client.items()))
        self._of_client.move_to_end(client)
        key = min(waiting, key=waiting.__getitem__)
        self.remove(key)
        return key

    def remove(self, key: str) -> None:
        """Takes a key out wherever it waits."""
        for client in [one for one, waiting in self._of_client.items() if key in waiting]:
            waiting = self._of_client[client]
            self._characters[client] -= waiting.pop(key)
            if not waiting:
                del self._of_client[client], self._characters[client]
