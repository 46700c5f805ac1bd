"""PendingPrefixes: which prefixes are about to be in the cache (in-batch prefix caching).

Of requests that arrive together with the same prefix, the first computes it and the others wait
one pass for it, instead of computing it side by side.

Two prompts that agree beyond what is cached end their cached part at the same node of the tree, and
go on with the same tokens. So a pending prompt is noted as that node with the tokens that follow,
and one look-up finds it however many others there are, and however long the prefix is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.scheduling.kv_memory import match_limit
from runtime.scheduling.radix_tree import TOKEN_BYTES

if TYPE_CHECKING:
    from runtime.request import Request
    from runtime.scheduling.kv_memory import KVMemory
    from runtime.scheduling.radix_cache import PrefixMatch
    from runtime.scheduling.radix_tree import Node

WORTH_WAITING_TOKENS = 32
MAX_LEFT = 64  # requests left for their twins in one pass; it then stops looking


class PendingPrefixes:
    """Prompts of the pending chunk and of the requests a pass has admitted or refused. Valid
    within one pass: nothing is put into the cache or taken out of it meanwhile."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        # What is shared is worth a pass only from that many tokens on, and comes in pages.
        self._gain = -(-WORTH_WAITING_TOKENS // memory.page_size) * memory.page_size
        self._heads: set[tuple[Node | str, bytes]] = set()
        self.left = 0

    def add(self, request: Request) -> None:
        # All that is cached of it counts, not only what it may use: the others may use more.
        match = self._memory.whole_match(request, self._gain)
        if match is not None:
            self._heads.add(self._head(request, match))

    def worth_waiting(self, request: Request, match: PrefixMatch) -> bool:
        """Whether some pending prompt will soon extend what is cached for this one by enough."""
        if not self._heads or match.tokens + self._gain > match_limit(request):
            return False
        return self._head(request, match) in self._heads

    def _head(self, request: Request, match: PrefixMatch) -> tuple[Node | str, bytes]:
        first = match.tokens * TOKEN_BYTES
        following = request.scheduling.key[first : first + self._gain * TOKEN_BYTES]
        return match.node or request.namespace, following
