"""Kills processes that write a file of KV pages, at random moments, and looks at what they leave.

    python killed_writers.py FILE KILLS SEED

Each writer opens the file, looks at every page that is in it, and goes on writing until it is
killed. The last line of the output says how many pages were looked at, over all kills; a page that
does not hold what its key says ends the run with status 1.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
from array import array
from pathlib import Path

from runtime.offload.page_file import FilePage, PageFile, page_key, root_key

MARK = b"a model"
PAGE_BYTES = 150_000
FRAMES = 40


def kv_of(key: bytes) -> bytes:
    """What a page with this key holds."""
    return random.Random(key).randbytes(PAGE_BYTES)


def open_file(path: Path) -> PageFile:
    return PageFile(path, MARK, page_bytes=PAGE_BYTES, frames=FRAMES, most_bytes=32 << 20)


def look(file: PageFile) -> int:
    """Reads every page that would be served; returns how many there are."""
    prefixes, keys = file.prefixes()
    seen: dict[int, bytes] = {}
    for prefix in prefixes:
        before = root_key(MARK, prefix.namespace)
        for at, frame in enumerate(prefix.frames):
            before = page_key(before, prefix.token_ids[2 * at : 2 * at + 2])
            seen[frame] = before
    for frame, key in seen.items():
        assert keys[frame] == key, "a page hangs where it does not belong"
        assert file.read(frame, key) == kv_of(key), "a page holds something else"
    return len(seen)


def write_for_ever(path: Path, seed: int, progress: int) -> None:
    """Prompts of some pages each, in frames that are used again and again."""
    rng = random.Random(seed)
    file = open_file(path)
    while True:
        tokens = array("i", [rng.randrange(4) for _ in range(2 * rng.randint(1, 6))])
        frames = rng.sample(range(1, FRAMES + 1), len(tokens) // 2)
        before = root_key(MARK, "")
        pages = []
        for at, frame in enumerate(frames):
            ids = tokens[2 * at : 2 * at + 2]
            key = page_key(before, ids)
            pages.append(FilePage(frame, key, before, "", ids, kv_of(key)))
            before = key
        os.write(progress, b"w")
        file.write(pages)
        os.write(progress, b"d")


def kill_one(path: Path, rng: random.Random) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        write_for_ever(path, rng.randrange(1 << 30), writer)
    os.close(writer)
    # So many signs of progress, and a moment more.
    for _ in range(rng.randint(1, 9)):
        os.read(reader, 1)
    select.select([], [], [], rng.random() * 0.004)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)


def main() -> int:
    path, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    pages = 0
    for _ in range(kills):
        kill_one(path, rng)
        file = open_file(path)
        try:
            pages += look(file)
        except AssertionError as error:
            print(error)
            return 1
        finally:
            file.close()
    print(f"{kills} kills, {pages} pages whole")
    return 0


if __name__ == "__main__":
    sys.exit(main())
