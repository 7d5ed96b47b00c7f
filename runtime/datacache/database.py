"""The file that raw samples are kept in: a SQLite database in write-ahead mode, in the user's directory.

SQLite allows one writer beside any number of readers, keeps transactions whole through a crash of the process or of the
machine, and raises errors where a file is damaged or a disk full. Each sample carries a checksum of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FILE = "samples.sqlite"
LOCK = "samples.lock"
SUFFIXES = ("", "-wal", "-shm")
VERSION = 1
PAGE_BYTES = 16 * 1024
"""Large pages: samples of tens of kB are written twice as fast as with SQLite's usual 4 KiB, for 8 kB lost in each."""
BUSY_S = 10.0
"""How long a transaction may wait for another process's."""
KEPT_FOR_S = 600.0
"""A dataset that has been read so recently is in use: another one does not push it out."""
_NUMBER_BITS, _LOG_SHARE = 40, 16
"""One part in so many of the bound is for SQLite's log of what is not in the database yet."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS dataset (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE NOT NULL, used_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS sample (id INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, raw BLOB NOT NULL);
"""
"""A sample's id is its dataset's, then its number in 40 bits. No dataset gets the id of one that was taken out, so a
process that has not heard of that yet finds nothing."""

DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_FORMAT")
"""Errors that a new database cures."""


class Damaged(Exception):
    """A sample's bytes are not what was stored."""


class Database:
    """One process's connection to the file, for one dataset. Every method may raise `sqlite3.Error` or `OSError`."""

    def __init__(self, folder: Path, bound_bytes: int, dataset: str, owned: np.ndarray | None = None) -> None:
        """Name the file of a folder, which is opened, or made, when it is needed first. `bound_bytes`: of all files in
        it, for all datasets; `dataset` tells this one from others; `owned`: per sample, whether this node reads it
        (bool), None for all.
        """
        self.path = folder / FILE
        self.folder = folder
        self.bound_bytes = bound_bytes
        self.dataset = dataset
        self.owned = owned
        self._swept = self.read_only = False
        self.lock = threading.RLock()
        self.connection: sqlite3.Connection | None = None
        self._inode = self._first = 0
        # Weakly: what only waits for a fork must not keep a database open.
        _OPEN.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Database, (self.folder, self.bound_bytes, self.dataset, self.owned)

    @contextlib.contextmanager
    def opened(self) -> Iterator[sqlite3.Connection]:
        """Hold the connection, for this thread alone."""
        with self.lock:
            if self.connection is None:
                self.connection = self._open()
            yield self.connection

    def close(self) -> None:
        """Release the file; the next use opens it again."""
        with self.lock:
            if self.connection is not None:
                self.connection.close()
            self.connection = None

    def _open(self) -> sqlite3.Connection:
        folder = existing(self.folder)
        self.read_only = not os.access(folder, os.W_OK) or bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
        if self.read_only:
            # Nobody can write to it, so the file needs no locks, which could not be taken either.
            connection = self._connect("?mode=ro&immutable=1")
            found = connection.execute("SELECT id FROM dataset WHERE name = ?", (self.dataset,)).fetchone()
            self._first = (found[0] if found else 0) << _NUMBER_BITS
            self._inode = os.stat(self.path).st_ino
            return connection
        self.folder.mkdir(parents=True, exist_ok=True)
        with _held(self.folder / LOCK):
            connection = self._connect()
            try:
                self._prepare(connection)
            except BaseException:
                connection.close()
                raise
        self._inode = os.stat(self.path).st_ino
        return connection

    def _connect(self, options: str = "") -> sqlite3.Connection:
        address = self.path.absolute().as_uri() + options
        return sqlite3.connect(address, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, VERSION):
            raise sqlite3.NotSupportedError(f"found version {version}, expected {VERSION}")
        if version == 0:
            connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA synchronous = OFF")  # nothing is in it yet; forcing that to the disk takes 0.1 s
        connection.execute("PRAGMA journal_mode = WAL")
        # The log is on the disk before the database follows it: nothing is torn when the machine stops.
        connection.execute("PRAGMA synchronous = NORMAL")
        log_pages = max(4, min(1000, log_bytes(self.bound_bytes) // 2 // PAGE_BYTES - 8))
        connection.execute(f"PRAGMA wal_autocheckpoint = {log_pages}")
        connection.execute(f"PRAGMA journal_size_limit = {log_pages * PAGE_BYTES}")
        if version == 0:
            connection.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
        self._enter(connection)

    def _enter(self, connection: sqlite3.Connection) -> None:
        connection.execute(
            "INSERT INTO dataset (name, used_s) VALUES (?, ?) "
            "ON CONFLICT (name) DO UPDATE SET used_s = excluded.used_s",
            (self.dataset, time.time()),
        )
        number = connection.execute("SELECT id FROM dataset WHERE name = ?", (self.dataset,)).fetchone()[0]
        self._first = number << _NUMBER_BITS

    def is_there(self) -> bool:
        """Whether the file that is open still has its name; True where none is open."""
        with self.lock, contextlib.suppress(OSError):
            return self.connection is None or os.stat(self.path).st_ino == self._inode
        return False

    def get(self, index: int) -> bytes | None:
        """The raw sample, or None. Raises Damaged: its bytes are not those that were stored."""
        with self.opened() as connection:
            row = connection.execute("SELECT checksum, raw FROM sample WHERE id = ?", (self._first + index,)).fetchone()
        if row is None:
            return None
        checksum, raw = row
        if isinstance(raw, bytes) and checksum == _checksum(self._first + index, raw):
            return raw
        raise Damaged

    def missing(self, indices: Sequence[int]) -> set[int]:
        """Return which samples are not there, by one query, which costs little more than a look for one."""
        with self.opened() as connection:
            ids = ",".join(str(self._first + index) for index in indices)
            rows = connection.execute(f"SELECT id FROM sample WHERE id IN ({ids})")
            return set(indices).difference(number - self._first for (number,) in rows)

    def delete(self, index: int) -> None:
        with self.opened() as connection:
            connection.execute("DELETE FROM sample WHERE id = ?", (self._first + index,))

    def put(self, samples: Sequence[tuple[int, bytes]]) -> int:
        """Store samples in one transaction, within the bound; those that are there stay. Returns how many had room."""
        with self.opened() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                self._enter(connection)
                # The first samples for which there is room, or room is made.
                bound_bytes = self.bound_bytes - log_bytes(self.bound_bytes)
                used_bytes = self.used_bytes(connection)
                sizes_bytes = [stored_bytes(len(raw)) for _, raw in samples]
                if used_bytes + sum(sizes_bytes) > bound_bytes:
                    used_bytes = self._evict(connection, bound_bytes - sum(sizes_bytes))
                kept = []
                for sample, size_bytes in zip(samples, sizes_bytes, strict=True):
                    used_bytes += size_bytes
                    if used_bytes <= bound_bytes:
                        kept.append(sample)
                connection.executemany(
                    "INSERT OR IGNORE INTO sample VALUES (?, ?, ?)",
                    [(self._first + index, _checksum(self._first + index, raw), raw) for index, raw in kept],
                )
                connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise
            return len(kept)

    def used_bytes(self, connection: sqlite3.Connection) -> int:
        pages, free = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count"))
        return int(pages - free) * PAGE_BYTES

    def size_bytes(self) -> int:
        size_bytes = 0
        for suffix in SUFFIXES:
            with contextlib.suppress(OSError):
                size_bytes += self.path.with_name(FILE + suffix).stat().st_size
        return size_bytes

    def _evict(self, connection: sqlite3.Connection, target_bytes: int) -> int:
        """Take samples out until at most `target_bytes` are used, if that can be; returns what is used.

        First datasets that nobody has read for long, then samples of this one that are not `owned`: those that other
        nodes read now.
        """
        old = connection.execute(
            "SELECT id FROM dataset WHERE name != ? AND used_s < ? ORDER BY used_s",
            (self.dataset, time.time() - KEPT_FOR_S),
        ).fetchall()
        for (number,) in old:
            first = number << _NUMBER_BITS
            while self.used_bytes(connection) > target_bytes:
                done = connection.execute(
                    "DELETE FROM sample WHERE id IN (SELECT id FROM sample WHERE id >= ? AND id < ? LIMIT 100)",
                    (first, first + (1 << _NUMBER_BITS)),
                )
                if not done.rowcount:
                    connection.execute("DELETE FROM dataset WHERE id = ?", (number,))
                    break
        if self.owned is not None and not self._swept:
            rows = connection.execute(
                "SELECT id FROM sample WHERE id >= ? AND id < ?", (self._first, self._first + (1 << _NUMBER_BITS))
            )
            numbers = np.array([number - self._first for (number,) in rows], dtype=np.int64)
            ids = [(self._first + index,) for index in numbers[~self.owned[numbers]].tolist()]
            while ids and self.used_bytes(connection) > target_bytes:
                connection.executemany("DELETE FROM sample WHERE id = ?", ids[:100])
                ids = ids[100:]
            self._swept = not ids
        surplus = connection.execute("PRAGMA page_count").fetchone()[0] - self.bound_bytes // PAGE_BYTES
        if surplus > 0:
            connection.execute(f"PRAGMA incremental_vacuum({surplus})").fetchall()
        return self.used_bytes(connection)

    def forget(self) -> None:
        with self.opened() as connection:
            last = self._first + (1 << _NUMBER_BITS)
            connection.execute("DELETE FROM sample WHERE id >= ? AND id < ?", (self._first, last))

    def remove(self) -> None:
        """Remove the file, so that the next use makes a new one; not where another process just did."""
        with self.lock:
            there = self.is_there()
            self.close()
            if there:
                with _held(self.folder / LOCK):
                    for suffix in SUFFIXES:
                        self.path.with_name(FILE + suffix).unlink(missing_ok=True)


def existing(folder: Path) -> Path:
    """Return a directory, or the nearest one above it that is there."""
    return next((one for one in (folder, *folder.parents) if one.exists()), folder)


def stored_bytes(size_bytes: int) -> int:
    """What a sample of so many bytes takes in the database, at the most."""
    return -(-(size_bytes + 64) // (PAGE_BYTES - 64)) * PAGE_BYTES


def log_bytes(bound_bytes: int) -> int:
    """How much of a bound is for SQLite's log, which may hold a batch more than it is told to, and the log's index."""
    return max(bound_bytes // _LOG_SHARE, 24 * PAGE_BYTES)


def batch_bytes(bound_bytes: int) -> int:
    """How much is written in one transaction, at the most, or else one sample."""
    return min(4 * 2**20, log_bytes(bound_bytes) // 4)


def least_bound_bytes(size_bytes: int) -> int:
    """The least bound under which one sample of so many bytes is kept: tables and log need some pages too."""
    return 24 * PAGE_BYTES + 3 * (8 * PAGE_BYTES + stored_bytes(size_bytes))


def _checksum(number: int, raw: bytes) -> int:
    """CRC-32 over the sample's id and bytes: a sample found in another's place is as wrong as a damaged one."""
    return zlib.crc32(raw, zlib.crc32(number.to_bytes(8, "little")))


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """Lock a file among processes; the kernel gives the lock back when its holder dies."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        deadline_s = time.monotonic() + BUSY_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.01)
        yield
    finally:
        os.close(handle)


_OPEN: weakref.WeakSet[Database] = weakref.WeakSet()
_STILL: list[Database] = []
"""Those that are held still while the process forks."""


# SQLite's connections must not be carried through a fork: they are closed before, while no other thread may use one.
def _before_fork() -> None:
    for database in list(_OPEN):
        database.lock.acquire()
        with contextlib.suppress(sqlite3.Error):
            database.close()
        database.connection = None
        _STILL.append(database)


def _after_fork() -> None:
    while _STILL:
        _STILL.pop().lock.release()


def _after_fork_in_child() -> None:
    while _STILL:
        _STILL.pop().lock = threading.RLock()  # the thread that held it is this one; others stayed with the parent


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
