"""Free KV pages, as ints.

Page 0 is never handed out: padding rows of a captured graph read and write it. A page
given back while a launched step still names it stays out of the free list until that step is
committed (`free_after`); it then counts as reserved.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from runtime.errors import InvariantError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // page_size)


def whole_pages(tokens: int, page_size: int) -> int:
    """Tokens, rounded up to whole pages."""
    return -(-tokens // page_size) * page_size


class PageAllocator:
    """Hands out pages, last in first out.

    Args:
        capacity_tokens: KV tokens of the pool; what does not fill a page is never used.
    """

    def __init__(self, capacity_tokens: int, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = capacity_tokens // page_size
        # An array, since the garbage collector walks through every entry of a list.
        self._free_pages = array("i", range(self.num_pages - 1, 0, -1))
        self._deferred: dict[int, array[int]] = {}  # by step: pages free once it is committed
        self._num_deferred = 0
        self.done_step = -1  # the newest step that is committed or was taken back

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    @property
    def free_tokens(self) -> int:
        return len(self._free_pages) * self.page_size

    @property
    def deferred_pages(self) -> int:
        """Pages given back that a launched step still names."""
        return self._num_deferred

    def allocate_pages(self, count: int) -> array[int]:
        """Takes `count` pages. The caller has made sure that they are there."""
        free = self._free_pages
        if count > len(free):
            raise InvariantError(f"{count} pages asked for, {len(free)} free")
        if not count:
            return array("i")
        taken = free[: -count - 1 : -1]
        del free[-count:]
        return taken

    def free(self, pages: Iterable[int]) -> None:
        """Gives pages back that no launched step names."""
        self._free_pages.extend(pages)

    def free_after(self, pages: array[int], step: int) -> None:
        """Gives pages back as soon as `step` is committed, at once if it is."""
        if step <= self.done_step:
            self.free(pages)
        elif pages:
            self._deferred.setdefault(step, array("i")).extend(pages)
            self._num_deferred += len(pages)

    def keep_after_all(self, pages: array[int], step: int) -> None:
        """Takes back what was to be given back after `step`, which is not committed."""
        kept = set(pages)
        deferred = self._deferred[step]
        self._deferred[step] = array("i", [page for page in deferred if page not in kept])
        self._num_deferred -= len(pages)

    def step_done(self, step: int) -> None:
        """`step` is committed or taken back, and nothing names what only it did: that is free."""
        self.done_step = step
        pages = self._deferred.pop(step, None)
        if pages:
            self._num_deferred -= len(pages)
            self.free(pages)

    def free_slices(self, pages: int) -> Iterator[array[int]]:
        """The free pages, so many at a time."""
        for first in range(0, len(self._free_pages), pages):
            yield self._free_pages[first : first + pages]

    def deferred(self) -> list[int]:
        """The pages that wait for a step."""
        return [page for pages in self._deferred.values() for page in pages]
