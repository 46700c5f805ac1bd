"""What enters and leaves the prefix cache, in blocks, for routers that know what is cached where.

A block is a page: its hash is made of its tokens and of the hash of the block before it, so that
equal hashes mean equal prefixes, whichever engine tells of them. Nothing is told of pages whose KV
a step in flight is still to write: if that step fails they were never there.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.scheduling.radix_tree import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = 0  # the page before a prompt's first: page 0 is never handed out


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that follow one another were put into the cache.

    Args:
        parent_hash: of the block before them; None where they begin the prompt.
        token_ids: of all of them, in order.
        namespace: prompts of different namespaces share nothing; part of the hashes.
    """

    hashes: list[int]
    parent_hash: int | None
    token_ids: array[int]
    block_size: int
    namespace: str


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks left the cache."""

    hashes: list[int]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is cached any more."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class _Pending:
    """Pages that are in the tree, and whose KV `step` is to write."""

    step: int
    parent: int
    namespace: str
    key: bytes
    pages: array[int]


class CacheEvents:
    """Collects events until they are taken. Told by KVMemory and RadixCache, in pages."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._events: list[CacheEvent] = []
        self._hashes: dict[int, int] = {}  # by page, of what was told and is still cached
        self._pending: list[_Pending] = []  # in the order of their insertion
        self._step_of: dict[int, int] = {}  # by page of a pending insertion

    def take(self) -> list[CacheEvent]:
        """The events since the last time, oldest first."""
        events, self._events = self._events, []
        return events

    def stored(
        self, parent: int, namespace: str, key: bytes, pages: array[int], step: int, done: int
    ) -> None:
        """Pages were put into the tree.

        Args:
            parent: the page before them, or ROOT.
            key: bytes of their tokens.
            step: writes their KV; done: the newest step that is committed.
        """
        # A parent that is not written yet may still be taken back, and its children with it.
        step = max(step, self._step_of.get(parent, step))
        made = _Pending(step, parent, namespace, key, pages)
        if step <= done:
            self._tell(made)
        else:
            self._pending.append(made)
            self._step_of.update(dict.fromkeys(pages, step))

    def step_done(self, step: int) -> None:
        """A step is committed, or what it put into the tree was taken out again."""
        if not self._pending:
            return
        written = [made for made in self._pending if made.step <= step]
        self._pending = [made for made in self._pending if made.step > step]
        for made in written:
            for page in made.pages:
                del self._step_of[page]
            self._tell(made)

    def removed(self, pages: Iterable[int]) -> None:
        """Pages left the tree: those that nobody was told of quietly."""
        known = [page for page in pages if page in self._hashes]
        if known:
            self._events.append(BlockRemoved([self._hashes.pop(page) for page in known]))
        gone = {page for page in pages if self._step_of.pop(page, None) is not None}
        if gone:
            self._pending = [left for made in self._pending if (left := self._without(made, gone))]

    def cleared(self) -> None:
        """The tree was emptied; nothing was pending."""
        self._hashes.clear()
        self._events.append(AllBlocksCleared())

    def _without(self, made: _Pending, gone: set[int]) -> _Pending | None:
        """What is left of an insertion: pages leave from the end of a path."""
        kept = array("i", [page for page in made.pages if page not in gone])
        if not kept:
            return None
        key = made.key[: len(kept) * self._page_size * TOKEN_BYTES]
        return _Pending(made.step, made.parent, made.namespace, key, kept)

    def _tell(self, made: _Pending) -> None:
        parent_hash = self._hashes[made.parent] if made.parent != ROOT else None
        unit = self._page_size * TOKEN_BYTES
        before = made.namespace.encode() if parent_hash is None else _bytes(parent_hash)
        hashes = []
        for at, page in enumerate(made.pages):
            digest = hashlib.sha256(before + made.key[at * unit : (at + 1) * unit]).digest()
            before = digest[:8]
            self._hashes[page] = int.from_bytes(before, "big")
            hashes.append(self._hashes[page])
        token_ids = array("i", made.key)
        self._events.append(
            BlockStored(hashes, parent_hash, token_ids, self._page_size, made.namespace)
        )


def _bytes(block_hash: int) -> bytes:
    return block_hash.to_bytes(8, "big")
