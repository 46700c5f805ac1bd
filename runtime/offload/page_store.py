"""PageStore: performs the copies and loads that a scheduler names, on a thread of its own.

    pool --copy--> read --keep--> host memory --write--> file
    pool <--load--------------------- or, where it is not there any more, from the file

Loads go first, since somebody waits for them; then copies; writes to the file come last, until
much waits to be written. Nobody waits here but this thread: what the engine calls returns at once,
and two callbacks tell it of ends. Pages that were read are kept, in host memory or the file, only
when the scheduler says that they were cached all the while.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Protocol

import numpy as np

from runtime.offload.page_file import FilePage, page_key, root_key
from runtime.scheduling.write_behind import NO_FRAME

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runtime.offload.page_file import PageFile
    from runtime.scheduling.kv_tier import PageLoad
    from runtime.scheduling.write_behind import PageCopy

log = logging.getLogger("loomserve.offload")

_PIECE_BYTES = 8 << 20  # written at once, which a load may have to wait for; or loaded at once
_UNWRITTEN_BYTES = 256 << 20  # from here on writes go before copies


class MovesPages(Protocol):
    """Moves pages between the device and host memory; called by one thread at a time."""

    page_bytes: int

    def read(self, pages: Sequence[int]) -> np.ndarray: ...
    def write(self, pages: Sequence[int], kv: np.ndarray) -> None: ...


class PageStore:
    """Frames, in host memory and in a file.

    Args:
        mover: of the device's pages.
        memory_frames: frames that host memory has room for; without a file all of them.
        file: None: there is none. keys: of its frames, which are there from before.
        fingerprint: as the file's.
    """

    def __init__(
        self,
        mover: MovesPages,
        memory_frames: int,
        *,
        file: PageFile | None = None,
        keys: dict[int, bytes] | None = None,
        fingerprint: bytes = b"",
    ) -> None:
        self._mover = mover
        self._memory_frames = memory_frames
        self._file = file
        self._fingerprint = fingerprint
        self._keys = dict(keys or {})  # by frame; of what can be loaded
        # By frame, the latest used last.
        self._in_memory: OrderedDict[int, memoryview] = OrderedDict()
        self._unwritten: OrderedDict[int, FilePage] = OrderedDict()  # by frame
        self._most_unwritten = max(_UNWRITTEN_BYTES // mover.page_bytes, 1)
        self._reads: dict[int, list[FilePage]] = {}  # by copy, until it is known what to keep
        self._copies: deque[PageCopy] = deque()
        self._loads: deque[PageLoad] = deque()
        self._writes = file is not None
        self._clear = False
        self._closing = False
        self._changed = threading.Condition()
        self._stored: Callable[[int, int], None] = lambda copy_id, pages: None
        self._loaded: Callable[[int, int], None] = lambda load_id, pages: None
        self._thread = threading.Thread(target=self._work, name="kv-offload", daemon=True)
        self._thread.start()

    # The engine calls these from the event loop, so each returns at once.

    def report_to(
        self, stored: Callable[[int, int], None], loaded: Callable[[int, int], None]
    ) -> None:
        """Whom to call, from another thread, with a copy's or load's id and how many of its pages,
        from the first on, were read or are in place."""
        self._stored, self._loaded = stored, loaded

    def begin(self, copies: Sequence[PageCopy], loads: Sequence[PageLoad]) -> None:
        """Starts what a pass has named."""
        if copies or loads:
            with self._changed:
                self._copies.extend(copies)
                self._loads.extend(loads)
                self._changed.notify()

    def keep(self, copy_id: int, pages: int) -> None:
        """Keeps the first pages of a copy that is done, and drops the others."""
        with self._changed:
            for page in self._reads.pop(copy_id, [])[:pages]:
                self._keys[page.frame] = page.key
                self._keep_in_memory(page.frame, memoryview(page.kv))
                if self._writes:
                    self._unwritten[page.frame] = page
                    self._unwritten.move_to_end(page.frame)
            self._changed.notify()

    def clear(self) -> None:
        """Forgets everything; nothing is being loaded."""
        with self._changed:
            self._keys.clear()
            self._in_memory.clear()
            self._unwritten.clear()
            self._clear = self._file is not None
            self._changed.notify()

    def close(self) -> None:
        """Writes what is left to write, and ends. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            job()

    def _next_job(self) -> Callable[[], None] | None:
        """Waits for something to do; None: all is done, and the store is to close."""
        with self._changed:
            while True:
                if self._clear:
                    self._clear = False
                    return self._clear_file
                if self._loads:
                    load = self._loads.popleft()
                    return lambda: self._load(load)
                full = len(self._unwritten) > self._most_unwritten
                if self._copies and not full:
                    copy = self._copies.popleft()
                    return lambda: self._copy(copy)
                if self._unwritten:
                    return self._write_some
                if self._closing:
                    return None
                self._changed.wait()

    def _copy(self, copy: PageCopy) -> None:
        count = 0
        try:
            pages = self._read(copy)
            with self._changed:
                self._reads[copy.copy_id] = pages
            count = len(pages)
        except Exception:
            log.exception("pages of KV could not be copied to host memory")
        self._stored(copy.copy_id, count)

    def _read(self, copy: PageCopy) -> list[FilePage]:
        if copy.before == NO_FRAME:
            before = root_key(self._fingerprint, copy.namespace)
        else:
            before = self._keys[copy.before]
        size = len(copy.token_ids) // len(copy.pages)
        pages = []
        # Rows of their own: what is dropped frees its memory whatever else was read with it.
        for at, row in enumerate(self._mover.read(copy.pages)):
            ids = copy.token_ids[at * size : (at + 1) * size]
            key = page_key(before, ids)
            kv = row.copy().data
            pages.append(FilePage(copy.frames[at], key, before, copy.namespace, ids, kv))
            before = key
        return pages

    def _load(self, load: PageLoad) -> None:
        count = 0
        most = max(_PIECE_BYTES // self._mover.page_bytes, 1)
        try:
            while count < len(load.frames):
                wanted = load.frames[count : count + most]
                found = self._find_some(wanted)
                if found:
                    self._mover.write(load.pages[count : count + len(found)], np.stack(found))
                count += len(found)
                if len(found) < len(wanted):
                    break
        except Exception:
            log.exception("pages of KV could not be copied to the device")
        self._loaded(load.load_id, count)

    def _find_some(self, frames: Sequence[int]) -> list[np.ndarray]:
        """What these frames hold, up to the first that cannot be had."""
        found = []
        for frame in frames:
            kv = self._find(frame)
            if kv is None:
                break
            found.append(np.frombuffer(kv, dtype=np.uint8))
        return found

    def _find(self, frame: int) -> bytes | memoryview | None:
        """What a frame holds; None where it cannot be had."""
        with self._changed:
            key = self._keys.get(frame)
            if key is None:
                return None
            kv = self._in_memory.get(frame)
            if kv is None and (page := self._unwritten.get(frame)) is not None:
                kv = memoryview(page.kv)
            if kv is not None:
                self._keep_in_memory(frame, kv)
                return kv
        read = None if self._file is None else self._file.read(frame, key)
        if read is not None:
            with self._changed:
                self._keep_in_memory(frame, memoryview(read))
        return read

    def _keep_in_memory(self, frame: int, kv: memoryview) -> None:
        """Keeps a frame in memory, and lets go of the least used. The caller has the lock."""
        self._in_memory[frame] = kv
        self._in_memory.move_to_end(frame)
        while len(self._in_memory) > self._memory_frames:
            self._in_memory.popitem(last=False)

    def _write_some(self) -> None:
        with self._changed:
            most = max(_PIECE_BYTES // self._mover.page_bytes, 1)
            pages = list(self._unwritten.values())[:most]
        if self._file is None or not pages:
            return
        try:
            self._file.write(pages)
        except sqlite3.Error as error:
            log.warning("KV pages are not written to the file any more: %s", error)
            self._stop_writing()
            return
        with self._changed:
            for page in pages:
                if self._unwritten.get(page.frame) is page:
                    del self._unwritten[page.frame]

    def _stop_writing(self) -> None:
        """What is in the file can still be read, and no more comes to it."""
        with self._changed:
            self._unwritten.clear()
            self._writes = False

    def _clear_file(self) -> None:
        if self._file is not None:
            self._file.clear()
