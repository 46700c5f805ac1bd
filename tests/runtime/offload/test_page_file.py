"""The file of KV pages: what is written is found again, and nothing else is ever served."""

from __future__ import annotations

import os
import random
import sqlite3
from array import array
from pathlib import Path

import pytest

from runtime.errors import ConfigError
from runtime.offload.page_file import (
    UNIT,
    FilePage,
    PageFile,
    UntrustedFile,
    frames_that_fit,
    page_key,
    root_key,
)

MARK = b"a model"
PAGE_BYTES = 100_000
FRAMES = 50


def opened(path: Path, mark: bytes = MARK, **options) -> PageFile:
    given = {"page_bytes": PAGE_BYTES, "frames": FRAMES, "most_bytes": 64 << 20, **options}
    return PageFile(path, mark, **given)


def kv_of(key: bytes) -> bytes:
    """What a page with this key holds: made from the key alone."""
    return random.Random(key).randbytes(PAGE_BYTES)


def chain(tokens: list[int], frames: list[int], namespace: str = "", mark: bytes = MARK):
    """The pages of a prompt, two tokens each."""
    before = root_key(mark, namespace)
    pages = []
    for at, frame in enumerate(frames):
        ids = array("i", tokens[2 * at : 2 * at + 2])
        key = page_key(before, ids)
        pages.append(FilePage(frame, key, before, namespace, ids, kv_of(key)))
        before = key
    return pages


def found_in(file: PageFile) -> dict[tuple[str, tuple[int, ...]], list[int]]:
    """By namespace and tokens of each prompt its frames, every page of it being whole."""
    prefixes, keys = file.prefixes()
    for prefix in prefixes:
        for frame in prefix.frames:
            assert file.read(frame, keys[frame]) == kv_of(keys[frame])
    return {(p.namespace, tuple(p.token_ids)): list(p.frames) for p in prefixes}


def test_prompts_are_found_again_by_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    file = opened(path)
    file.write(chain([1, 2, 3, 4, 5, 6], [9, 4, 7]))
    file.write(chain([1, 2, 8, 8], [9, 11]))
    file.write(chain([1, 2, 3, 4], [20, 21], namespace="salt"))
    file.close()
    file = opened(path)
    assert found_in(file) == {
        ("", (1, 2, 3, 4, 5, 6)): [9, 4, 7],
        ("", (1, 2, 8, 8)): [9, 11],
        ("salt", (1, 2, 3, 4)): [20, 21],
    }
    file.close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_hangs_in_nothing_is_deleted(tmp_path: Path) -> None:
    """A frame in the middle was used for another page, and the server was killed."""
    file = opened(tmp_path / "kv")
    file.write(chain([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4]))
    file.write(chain([9, 9], [2]))
    assert found_in(file) == {("", (1, 2)): [1], ("", (9, 9)): [2]}
    assert file._database.execute("SELECT count(*) FROM pages").fetchone() == (2,)
    file.close()


def test_kv_of_another_model_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    file = opened(path)
    file.write(chain([1, 2], [1]))
    file.close()
    other = opened(path, b"another model")
    assert found_in(other) == {}
    other.close()
    again = opened(path)
    assert found_in(again) == {}
    again.close()


@pytest.mark.parametrize("kind", ["text", "another database"])
def test_a_file_that_is_not_ours_is_left_as_it_is(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "thesis"
    if kind == "text":
        path.write_text("My thesis, of which I have no copy.")
    else:
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE photos (name TEXT)")
        database.close()
    path.chmod(0o600)
    before = path.read_bytes()
    with pytest.raises(UntrustedFile, match="no file of KV pages"):
        opened(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_others_may_write_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    opened(path).close()
    path.chmod(0o620)
    with pytest.raises(UntrustedFile, match="mode 620"):
        opened(path)


def test_a_file_of_another_user_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv"
    opened(path).close()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UntrustedFile, match="another user"):
        opened(path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kv").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"kv_offload_path .*cannot be opened"):
        opened(tmp_path / "kv")
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_is_not_there_is_an_error_that_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_offload_path .*none/kv: cannot be opened"):
        opened(tmp_path / "none" / "kv")


def test_two_processes_do_not_share_a_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("runtime.offload.page_file._BUSY_S", 0.0)
    file = opened(tmp_path / "kv")
    with pytest.raises(ConfigError, match="another process uses it"):
        opened(tmp_path / "kv")
    file.close()


def filled(path: Path) -> dict[tuple[str, tuple[int, ...]], list[int]]:
    """A file with some prompts in it, all of it in the file itself; returns what is in it."""
    file = opened(path)
    for prompt in range(8):
        frames = list(range(5 * prompt + 1, 5 * prompt + 6))
        file.write(chain([prompt, *range(9)], frames))
    found = found_in(file)
    file.close()
    return found


@pytest.mark.parametrize("seed", range(12))
def test_damage_costs_pages_and_never_serves_a_wrong_one(tmp_path: Path, seed: int) -> None:
    """Bytes are changed at random; `found_in` compares every page with what it should hold."""
    path = tmp_path / "kv"
    whole = filled(path)
    rng = random.Random(seed)
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 20, 300])):
        content[rng.randrange(100, len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    file = opened(path)
    prefixes, keys = file.prefixes()
    for prefix in prefixes:
        assert any(
            tokens[: len(prefix.token_ids)] == tuple(prefix.token_ids) for _, tokens in whole
        )
        for frame in prefix.frames:
            assert file.read(frame, keys[frame]) in (None, kv_of(keys[frame]))
    file.write(chain([77, 78], [FRAMES]))  # and it goes on
    file.close()


def test_no_page_of_the_database_that_is_lost_keeps_it_from_being_opened(tmp_path: Path) -> None:
    """Its first bytes become zeros: an index's, a table's, or its roots'."""
    path = tmp_path / "kv"
    filled(path)
    content = path.read_bytes()
    for page in range(1, len(content) // UNIT):
        at = page * UNIT
        path.write_bytes(content[:at] + bytes(64) + content[at + 64 :])
        file = opened(path)
        prefixes, keys = file.prefixes()
        for frame in (frame for prefix in prefixes for frame in prefix.frames):
            assert file.read(frame, keys[frame]) in (None, kv_of(keys[frame]))
        file.close()


@pytest.mark.parametrize("share", [0.0005, 0.2, 0.7, 0.999])
def test_a_torn_file_costs_pages_and_never_serves_a_wrong_one(tmp_path: Path, share: float) -> None:
    path = tmp_path / "kv"
    filled(path)
    os.truncate(path, int(path.stat().st_size * share))
    file = opened(path)
    prefixes, keys = file.prefixes()
    for prefix in prefixes:
        for frame in prefix.frames:
            assert file.read(frame, keys[frame]) in (None, kv_of(keys[frame]))
    file.close()


def test_a_page_that_is_damaged_while_it_is_served_is_found_out(tmp_path: Path) -> None:
    file = opened(tmp_path / "kv")
    (page,) = chain([1, 2], [1])
    file.write([page])
    wrong = bytearray(page.kv)
    wrong[5000] ^= 1
    file._database.execute("UPDATE pages SET kv = ?", (bytes(wrong),))
    assert file.read(1, page.key) is None
    file.write([page])
    assert file.read(1, page.key) == page.kv
    assert file.read(1, b"another key 1234") is None
    file.close()


def test_the_file_stays_within_its_bound_however_much_is_written(tmp_path: Path) -> None:
    most = 8 << 20
    frames = frames_that_fit(most, PAGE_BYTES)
    assert frames > 20
    path = tmp_path / "kv"
    file = opened(path, frames=frames, most_bytes=most)
    for turn in range(4):
        for frame in range(1, frames + 1):
            file.write(chain([turn, frame], [frame]))
    assert len(found_in(file)) == frames
    file.close()
    assert path.stat().st_size <= most


def test_a_smaller_bound_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    filled(path)
    file = opened(path, frames=10, most_bytes=2 << 20)
    assert found_in(file) == {}
    file.close()
    assert path.stat().st_size <= 2 << 20


def test_a_full_disk_is_an_error_and_what_was_written_stays(tmp_path: Path) -> None:
    file = opened(tmp_path / "kv", most_bytes=4 << 20)

    def write_all() -> None:
        for frame in range(1, FRAMES):
            file.write(chain([frame, 1], [frame]))

    with pytest.raises(sqlite3.OperationalError, match="full"):
        write_all()
    assert len(found_in(file)) >= 20
    file.close()
