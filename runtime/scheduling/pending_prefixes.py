"""PendingPrefixes: which prefixes are about to be in the cache (in-batch prefix caching).

Of requests that arrive together with the same prefix, the first computes it and the others wait
one pass for it, instead of computing it side by side. A pass looks at few requests, so this is a
list of their tokens and not a second tree: one memcmp each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.scheduling.kv_memory import match_limit
from runtime.scheduling.radix_cache import TOKEN_BYTES

if TYPE_CHECKING:
    from runtime.request import Request

WORTH_WAITING_TOKENS = 32
MAX_LEFT = 64  # requests left for their twins in one pass; it then stops looking


class PendingPrefixes:
    """Prompts of the pending chunk and of the requests a pass has admitted or passed over."""

    def __init__(self, page_size: int) -> None:
        # What is shared is worth a pass only from that many tokens on, and comes in pages.
        self._gain = -(-WORTH_WAITING_TOKENS // page_size) * page_size
        self._keys: dict[str, list[bytes]] = {}
        self.left = 0

    def add(self, request: Request) -> None:
        self._keys.setdefault(request.namespace, []).append(request.scheduling.key)

    def worth_waiting(self, request: Request, cached_tokens: int) -> bool:
        """Whether some pending prompt will soon extend what is cached for this one by enough."""
        others = self._keys.get(request.namespace)
        wanted = cached_tokens + self._gain
        if not others or wanted > match_limit(request):
            return False
        head = request.scheduling.key[: wanted * TOKEN_BYTES]
        return any(key.startswith(head) for key in others)
