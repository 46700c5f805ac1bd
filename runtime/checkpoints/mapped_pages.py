"""Pages of a mapped file that are no longer needed in memory."""

from __future__ import annotations

import mmap


def release_pages(mapped: mmap.mmap, begin: int, end: int) -> None:
    """Drops the whole pages between two offsets: else a model that is loaded would be in memory
    twice, as it was packed and as the file has it."""
    page = mmap.PAGESIZE
    begin, end = -(-begin // page) * page, end // page * page
    if begin < end and hasattr(mapped, "madvise"):
        mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)
