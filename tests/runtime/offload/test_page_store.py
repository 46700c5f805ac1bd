"""The thread that copies and loads: what it keeps, in which order it works, and what it does when
something cannot be read or written."""

from __future__ import annotations

import queue
import sqlite3
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from runtime.offload.page_file import PageFile
from runtime.offload.page_store import PageStore
from runtime.scheduling.kv_tier import PageLoad, TierPrefix
from runtime.scheduling.write_behind import NO_FRAME, PageCopy

PAGE_BYTES = 40_000
MARK = b"mark"
Told = tuple[str, int, int]


class Pool:
    """The device's pages: of each the byte that fills it. Args: gate: reads wait for it."""

    page_bytes = PAGE_BYTES

    def __init__(self) -> None:
        self.pages: dict[int, int] = {}
        self.gate: queue.SimpleQueue[None] | None = None
        self.broken = False
        self.log: list[str] = []

    def read(self, pages: Sequence[int]) -> np.ndarray:
        if self.gate is not None:
            self.gate.get(timeout=30)
        if self.broken:
            raise RuntimeError("the device is gone")
        self.log.append("read")
        return np.stack([np.full(PAGE_BYTES, self.pages[page], np.uint8) for page in pages])

    def write(self, pages: Sequence[int], kv: np.ndarray) -> None:
        self.log.append("write")
        for page, row in zip(pages, kv, strict=True):
            assert (row == row[0]).all()
            self.pages[page] = int(row[0])


class Engine:
    """Begins what it is told to, and hears of ends."""

    def __init__(self, pool: Pool, memory_frames: int, path: Path | None = None) -> None:
        self.pool = pool
        self.told: queue.SimpleQueue[Told] = queue.SimpleQueue()
        file = None
        keys: dict[int, bytes] = {}
        self.prefixes: list[TierPrefix] = []
        if path is not None:
            file = PageFile(path, MARK, page_bytes=PAGE_BYTES, frames=100, most_bytes=64 << 20)
            self.prefixes, keys = file.prefixes()
        self.store = PageStore(pool, memory_frames, file=file, keys=keys, fingerprint=MARK)
        self.store.report_to(
            lambda copy_id, pages: self.told.put(("stored", copy_id, pages)),
            lambda load_id, pages: self.told.put(("loaded", load_id, pages)),
        )
        self.next = 0

    def hear(self) -> Told:
        return self.told.get(timeout=30)

    def copy(self, pages: list[int], frames: list[int], before: int = NO_FRAME) -> PageCopy:
        made = PageCopy(
            self.next, array("i", pages), array("i", frames), before, "", array("i", pages)
        )
        self.next += 1
        return made

    def keep(self, pages: list[int], frames: list[int], before: int = NO_FRAME) -> None:
        copy = self.copy(pages, frames, before)
        self.store.begin([copy], [])
        assert self.hear() == ("stored", copy.copy_id, len(pages))
        self.store.keep(copy.copy_id, len(pages))

    def load(self, frames: list[int], pages: list[int]) -> int:
        self.store.begin([], [PageLoad(77, array("i", frames), array("i", pages))])
        kind, _, count = self.hear()
        assert kind == "loaded"
        return count


@pytest.fixture
def pool() -> Pool:
    pool = Pool()
    pool.pages = {page: page for page in range(1, 100)}
    return pool


@pytest.fixture
def engine(pool: Pool) -> Iterator[Engine]:
    made = Engine(pool, memory_frames=10)
    yield made
    made.store.close()


def test_what_was_kept_is_loaded_wherever_it_goes(engine: Engine) -> None:
    engine.keep([1, 2, 3], [7, 8, 9])
    engine.pool.pages.update({1: 0, 2: 0, 3: 0})
    assert engine.load([7, 8, 9], [50, 51, 52]) == 3
    assert [engine.pool.pages[page] for page in (50, 51, 52)] == [1, 2, 3]


def test_what_is_not_to_be_kept_cannot_be_loaded(engine: Engine) -> None:
    copy = engine.copy([1, 2, 3], [7, 8, 9])
    engine.store.begin([copy], [])
    engine.hear()
    engine.store.keep(copy.copy_id, 1)
    assert engine.load([7, 8, 9], [50, 51, 52]) == 1
    assert [engine.pool.pages[page] for page in (50, 51, 52)] == [1, 51, 52]


def test_loads_go_before_copies(engine: Engine) -> None:
    engine.keep([1], [1])
    engine.pool.gate = queue.SimpleQueue()
    engine.store.begin([engine.copy([2], [2]), engine.copy([3], [3])], [])
    engine.store.begin([], [PageLoad(5, array("i", [1]), array("i", [60]))])
    engine.pool.log.clear()
    engine.pool.gate.put(None)
    engine.pool.gate.put(None)
    told = [engine.hear()[0] for _ in range(3)]
    # The first copy may have begun before the load was there.
    assert told in (["stored", "loaded", "stored"], ["loaded", "stored", "stored"])


def test_a_copy_that_fails_says_so_and_the_next_ones_go_on(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.pool.broken = True
    copy = engine.copy([1], [1])
    engine.store.begin([copy], [])
    assert engine.hear() == ("stored", copy.copy_id, 0)
    engine.store.keep(copy.copy_id, 0)
    assert "could not be copied" in caplog.text
    engine.pool.broken = False
    engine.keep([2], [2])
    assert engine.load([2], [60]) == 1


def test_what_memory_has_no_room_for_comes_from_the_file(pool: Pool, tmp_path: Path) -> None:
    engine = Engine(pool, memory_frames=2, path=tmp_path / "kv")
    engine.keep([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    assert engine.load([1, 2, 3, 4, 5], [50, 51, 52, 53, 54]) == 5
    assert [pool.pages[page] for page in range(50, 55)] == [1, 2, 3, 4, 5]
    assert len(engine.store._in_memory) == 2
    engine.store.close()


def test_the_next_process_has_what_was_kept(pool: Pool, tmp_path: Path) -> None:
    engine = Engine(pool, memory_frames=2, path=tmp_path / "kv")
    engine.keep([1, 2], [1, 2])
    engine.keep([3], [9], before=2)
    unkept = engine.copy([4], [4], before=9)
    engine.store.begin([unkept], [])
    engine.hear()
    engine.store.close()
    engine = Engine(pool, memory_frames=2, path=tmp_path / "kv")
    (prefix,) = engine.prefixes
    assert (list(prefix.token_ids), list(prefix.frames)) == ([1, 2, 3], [1, 2, 9])
    assert engine.load([1, 2, 9], [60, 61, 62]) == 3
    assert [pool.pages[page] for page in (60, 61, 62)] == [1, 2, 3]
    engine.store.close()


def test_a_page_lost_in_the_file_ends_a_load_there(pool: Pool, tmp_path: Path) -> None:
    engine = Engine(pool, memory_frames=1, path=tmp_path / "kv")
    engine.keep([1, 2, 3], [1, 2, 3])
    engine.store.close()
    with sqlite3.connect(tmp_path / "kv") as database:
        database.execute("UPDATE pages SET kv = zeroblob(40000) WHERE frame = 2")
    database.close()
    engine = Engine(pool, memory_frames=1, path=tmp_path / "kv")
    assert engine.load([1, 2, 3], [60, 61, 62]) == 1
    engine.store.close()


def test_a_full_disk_ends_the_writing_with_one_warning_and_nothing_else(
    pool: Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(pool, memory_frames=50, path=tmp_path / "kv")
    engine.keep([1], [1])
    engine.store.close()
    engine = Engine(pool, memory_frames=50, path=tmp_path / "kv")
    assert engine.store._file is not None
    engine.store._file._database.execute("PRAGMA max_page_count = 1")
    for page in range(2, 12):
        engine.keep([page], [page])
    for page in range(1, 12):
        assert engine.load([page], [60]) == 1
        assert pool.pages[60] == page
    engine.store.close()
    assert caplog.text.count("not written to the file any more") == 1
    engine = Engine(pool, memory_frames=50, path=tmp_path / "kv")
    assert [list(prefix.frames) for prefix in engine.prefixes] == [[1]]
    engine.store.close()


def test_what_is_forgotten_is_forgotten_for_good(pool: Pool, tmp_path: Path) -> None:
    engine = Engine(pool, memory_frames=50, path=tmp_path / "kv")
    engine.keep([1], [1])
    engine.store.clear()
    assert engine.load([1], [60]) == 0
    engine.keep([2], [2])
    engine.store.close()
    engine = Engine(pool, memory_frames=50, path=tmp_path / "kv")
    assert [list(prefix.frames) for prefix in engine.prefixes] == [[2]]
    engine.store.close()
