"""PageFile: pages of KV in a file that outlives the process; an SQLite database.

What is in it is found by what it was made from: the key of a page is a hash of its tokens and of
the key of the page before it, the first of a prompt hashes the fingerprint (model, weights, type,
page size) and the namespace. So a row that is whole is right, whatever was written before or after
it. Every page also has a checksum, over its key and its KV, that is looked at whenever it is read.

SQLite keeps the rows whole when the process is killed between any two writes. It is not told to
wait for the disk: after a power cut a row may be damaged, and is found to be.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
import stat
import zlib
from array import array
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.errors import ConfigError
from runtime.scheduling.kv_tier import TierPrefix

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

log = logging.getLogger("loomserve.offload")

APPLICATION_ID = 0x4C6F6F6D  # "Loom", in the header of the file
VERSION = 1
UNIT = 65536  # SQLite's pages: KV comes in large pieces
KEY_BYTES = 16
_ROW_BYTES = 4096  # of a row beside its KV and tokens, at most
_BUSY_S = 2.0
_SCHEMA = """
    CREATE TABLE fingerprint (value BLOB NOT NULL);
    CREATE TABLE pages (
        frame INTEGER PRIMARY KEY,
        written INTEGER NOT NULL,
        key BLOB NOT NULL,
        before BLOB NOT NULL,
        namespace TEXT NOT NULL,
        token_ids BLOB NOT NULL,
        checksum INTEGER NOT NULL,
        kv BLOB NOT NULL
    );
"""


@dataclass(frozen=True, slots=True)
class FilePage:
    """A page as it is written. Args: before: key of the page before it."""

    frame: int
    key: bytes
    before: bytes
    namespace: str
    token_ids: array[int]
    kv: bytes | memoryview


class UntrustedFile(Exception):
    """The file is not one of these, or not ours: it is left as it is."""


def page_key(before: bytes, token_ids: array[int]) -> bytes:
    """Key of a page behind another one."""
    return hashlib.sha256(before + token_ids.tobytes()).digest()[:KEY_BYTES]


def root_key(fingerprint: bytes, namespace: str) -> bytes:
    """What stands for the page before the first of a prompt."""
    return hashlib.sha256(fingerprint + namespace.encode()).digest()[:KEY_BYTES]


def frames_that_fit(file_bytes: int, page_bytes: int) -> int:
    """Pages that a file of this size holds."""
    # SQLite may leave most of a unit of its own empty beside each row.
    row = (-(-(page_bytes + _ROW_BYTES) // UNIT) + 1) * UNIT
    return max(file_bytes // row - 1, 0)


class PageFile:
    """An open file. For one thread at a time.

    Args:
        fingerprint: of all that KV depends on beside tokens and namespace; what was written under
            another one is deleted.
        page_bytes: of a page's KV. frames: numbers from 1 to this.
    Raises:
        ConfigError: it cannot be made, or another process uses it.
        UntrustedFile: it is there, and is no such file, or somebody else's.
    """

    def __init__(
        self, path: Path, fingerprint: bytes, *, page_bytes: int, frames: int, most_bytes: int
    ) -> None:
        self._path = path
        self._fingerprint = fingerprint
        self._page_bytes = page_bytes
        self.frames = frames
        self._most_bytes = most_bytes
        _check_file(path)
        try:
            self._database = self._open()
            fits = self._is_mine()
            self._written = self._newest()
        except sqlite3.DatabaseError as error:
            if _is_locked(error):
                raise ConfigError(f"kv_offload_path {path}: another process uses it") from None
            log.warning("%s is damaged (%s), and begun anew", path, error)
            fits = False
        if not fits:
            self._begin_anew()
            self._written = 0

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(
            self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        self._database = database
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute(f"PRAGMA page_size = {UNIT}")
        database.execute("PRAGMA synchronous = OFF")
        database.execute("BEGIN EXCLUSIVE")
        new = not database.execute("SELECT 1 FROM sqlite_master").fetchone()
        database.execute("COMMIT")
        if new:
            # Before there is a log, so that the file is known by its header from now on.
            database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            database.execute(f"PRAGMA user_version = {VERSION}")
            database.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
            database.execute("INSERT INTO fingerprint VALUES (?)", (self._fingerprint,))
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA wal_autocheckpoint = 256")  # 16 MiB
        database.execute(f"PRAGMA max_page_count = {max(self._most_bytes // UNIT, 8)}")
        return database

    def _is_mine(self) -> bool:
        """Whether what is in the file can be used, and is no larger than it may be."""
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        (pages,) = self._database.execute("PRAGMA page_count").fetchone()
        found = self._database.execute("SELECT value FROM fingerprint").fetchall()
        if (version, found) != (VERSION, [(self._fingerprint,)]):
            log.warning("%s holds KV of another model or setting, and is begun anew", self._path)
            return False
        if pages * UNIT > self._most_bytes:
            log.warning("%s is larger than it may be, and is begun anew", self._path)
            return False
        self._database.execute("DELETE FROM pages WHERE frame > ?", (self.frames,))
        return True

    def _begin_anew(self) -> None:
        with suppress(sqlite3.Error):
            self._database.close()
        for suffix in ("", "-wal", "-shm", "-journal"):
            with suppress(FileNotFoundError):
                os.unlink(f"{self._path}{suffix}")
        _check_file(self._path)
        self._database = self._open()

    def _newest(self) -> int:
        return int(self._database.execute("SELECT max(written) FROM pages").fetchone()[0] or 0)

    def prefixes(self) -> tuple[list[TierPrefix], dict[int, bytes]]:
        """What is in the file, prompt by prompt, the oldest first; and the key of each frame.

        Rows that hang in nothing, or whose key is not what it should be, are deleted.
        """
        try:
            rows = self._database.execute(
                "SELECT frame, key, before, namespace, token_ids FROM pages ORDER BY written"
            ).fetchall()
        except sqlite3.DatabaseError as error:
            log.warning("%s is damaged (%s), and begun anew", self._path, error)
            self._begin_anew()
            rows = []
        found = _Chains(rows, self._fingerprint)
        self.forget(found.useless)
        return found.prefixes(), found.keys

    def write(self, pages: Sequence[FilePage]) -> None:
        """Puts pages into their frames: all of them, or none where this raises.

        Raises: sqlite3.Error: the disk is full, or the file cannot be written any more.
        """
        rows = []
        for page in pages:
            self._written += 1
            tokens = page.token_ids.tobytes()
            checksum = _checksum(page.key, page.kv)
            names = (page.frame, self._written, page.key, page.before, page.namespace, tokens)
            rows.append((*names, checksum, page.kv))
        try:
            self._database.execute("BEGIN")
            self._database.executemany(
                "INSERT OR REPLACE INTO pages VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows
            )
            self._database.execute("COMMIT")
        except sqlite3.Error:
            with suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")
            raise

    def read(self, frame: int, key: bytes) -> bytes | None:
        """The KV of the page with this key; None where the frame holds another, or is damaged, in
        which case it is deleted."""
        try:
            row = self._database.execute(
                "SELECT key, checksum, kv FROM pages WHERE frame = ?", (frame,)
            ).fetchone()
        except sqlite3.Error as error:
            log.warning("%s: a page cannot be read: %s", self._path, error)
            return None
        if row is None or row[0] != key:
            return None
        kv = row[2]
        whole = isinstance(kv, bytes) and len(kv) == self._page_bytes
        if whole and _checksum(key, kv) == row[1]:
            return bytes(kv)
        log.warning("%s: a page is damaged, and computed anew", self._path)
        self.forget([frame])
        return None

    def forget(self, frames: Iterable[int]) -> None:
        """Deletes what is in these frames, as far as that is possible."""
        with suppress(sqlite3.Error):
            self._database.executemany(
                "DELETE FROM pages WHERE frame = ?", [(frame,) for frame in frames]
            )

    def clear(self) -> None:
        """Deletes every page."""
        with suppress(sqlite3.Error):
            self._database.execute("DELETE FROM pages")

    def close(self) -> None:
        """Idempotent."""
        with suppress(sqlite3.Error):
            self._database.close()


class _Chains:
    """Rows of a file, hung below one another by their keys. Rows: oldest first."""

    def __init__(self, rows: Sequence[tuple[int, bytes, bytes, str, bytes]], mark: bytes) -> None:
        self._rows: dict[bytes, tuple[int, str, array[int]]] = {}  # by key
        self._after: dict[bytes, list[bytes]] = {}
        self.keys: dict[int, bytes] = {}
        self.useless: list[int] = []
        roots = []
        for frame, key, before, namespace, tokens in rows:
            ids = _token_ids(tokens)
            if ids is None or key in self._rows or page_key(before, ids) != key:
                self.useless.append(frame)
                continue
            self._rows[key] = (frame, namespace, ids)
            if before == root_key(mark, namespace):
                roots.append(key)
            else:
                self._after.setdefault(before, []).append(key)
        self._find_leaves(roots)

    def _find_leaves(self, roots: list[bytes]) -> None:
        """Follows every chain from its first page on; what is not reached hangs in nothing."""
        self._before: dict[bytes, bytes | None] = dict.fromkeys(roots)
        stack = list(roots)
        ends = set()
        while stack:
            key = stack.pop()
            namespace = self._rows[key][1]
            below = [k for k in self._after.get(key, ()) if self._rows[k][1] == namespace]
            self._before.update(dict.fromkeys(below, key))
            stack += below
            if not below:
                ends.add(key)
        self._leaves = [key for key in self._rows if key in ends]  # oldest first
        self.keys = {self._rows[key][0]: key for key in self._before}
        self.useless += [row[0] for key, row in self._rows.items() if key not in self._before]

    def prefixes(self) -> list[TierPrefix]:
        """One for each leaf."""
        return [self._prefix(leaf) for leaf in self._leaves]

    def _prefix(self, leaf: bytes) -> TierPrefix:
        path = []
        key: bytes | None = leaf
        while key is not None:
            path.append(self._rows[key])
            key = self._before[key]
        path.reverse()
        tokens, frames = array("i"), array("i")
        for frame, _, ids in path:
            tokens.extend(ids)
            frames.append(frame)
        return TierPrefix(path[0][1], tokens, frames)


def _token_ids(stored: object) -> array[int] | None:
    if not isinstance(stored, bytes) or not stored or len(stored) % 4:
        return None
    return array("i", stored)


def _checksum(key: bytes, kv: bytes | memoryview) -> int:
    return zlib.crc32(kv, zlib.crc32(key))


def _is_locked(error: sqlite3.DatabaseError) -> bool:
    return error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _check_file(path: Path) -> None:
    """Makes the file where it is not there yet; looks at whose it is, and what.

    Raises: ConfigError: it cannot be made or opened. UntrustedFile: it is not to be touched.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"kv_offload_path {path}: cannot be opened: {error}") from error
    try:
        found = os.fstat(descriptor)
        head = os.pread(descriptor, 100, 0) if stat.S_ISREG(found.st_mode) else b"other"
    finally:
        os.close(descriptor)
    if found.st_uid != os.geteuid():
        raise UntrustedFile(f"{path} belongs to another user")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise UntrustedFile(
            f"{path} may be read or written by others (mode {found.st_mode & 0o777:o})"
        )
    known = head[:16] == b"SQLite format 3\0" and head[68:72] == APPLICATION_ID.to_bytes(4, "big")
    if head and not known:
        raise UntrustedFile(f"{path} is no file of KV pages")
