"""The file that raw samples are kept in: a SQLite database in write-ahead mode, in the user's directory.

SQLite allows one writer and any number of readers at once, keeps transactions whole through a crash of the process or
of the machine, and raises errors for damaged files and full disks. Each sample carries a checksum of its own.
"""

from __future__ import annotations

import contextlib
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
from filelock import FileLock

FILE = "samples.sqlite"
LOCK = "samples.lock"
SUFFIXES = ("", "-wal", "-shm")
VERSION = 1
PAGE_BYTES = 16 * 1024
"""Large pages: samples of tens of kB are written twice as fast as with SQLite's usual 4 KiB, for 8 kB lost in each."""
BUSY_S = 10.0
"""Longest wait of a transaction for another process's, in seconds."""
KEPT_FOR_S = 600.0
"""A dataset that was read within this time, in seconds, is in use: another one does not evict it."""
_NUMBER_BITS, _LOG_SHARE = 40, 16
"""Bits of an id for the sample's number; the bound over the part of it that is for SQLite's log of new pages."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS dataset (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE NOT NULL, used_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS sample (id INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, raw BLOB NOT NULL);
"""
"""A sample's id is its dataset's, then its number in 40 bits. No dataset gets the id of one that was taken out, so a
process that has not heard of that yet finds nothing."""

DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_FORMAT")
"""Beginnings of the names of errors that a new database cures."""


class Damaged(Exception):
    """A sample's bytes are not what was stored."""


class Database:
    """One process's connection to the file, for one dataset. Every method may raise `sqlite3.Error` or `OSError`."""

    def __init__(self, folder: Path, bound_bytes: int, dataset: str, owned: np.ndarray | None = None) -> None:
        """Name the file, which is opened, or made, when it is needed first.

        Args:
            folder: the directory of the file.
            bound_bytes: bound of all files in it, for all datasets.
            dataset: tells this dataset from others.
            owned: whether this node reads each sample (bool); None: all.
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
            # No process can write to it, so the file needs no locks, which could not be taken either.
            connection = self._connect("?mode=ro&immutable=1")
            self._find(connection)
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._file_lock():
                connection = self._connect()
                try:
                    self._prepare(connection)
                except BaseException:
                    connection.close()
                    raise
        self._inode = os.stat(self.path).st_ino
        return connection

    def _file_lock(self) -> FileLock:
        """Return the lock for making and removing the file."""
        return FileLock(self.folder / LOCK, timeout=BUSY_S, mode=0o666)

    def _connect(self, options: str = "") -> sqlite3.Connection:
        address = self.path.absolute().as_uri() + options
        return sqlite3.connect(address, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        version = _value(connection, "PRAGMA user_version")
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
        """Record that the dataset is in use."""
        connection.execute(
            "INSERT INTO dataset (name, used_s) VALUES (?, ?) "
            "ON CONFLICT (name) DO UPDATE SET used_s = excluded.used_s",
            (self.dataset, time.time()),
        )
        self._find(connection)

    def _find(self, connection: sqlite3.Connection) -> None:
        """Look up the id of the dataset's first sample."""
        found = connection.execute("SELECT id FROM dataset WHERE name = ?", (self.dataset,)).fetchone()
        self._first = (found[0] if found else 0) << _NUMBER_BITS

    def is_there(self) -> bool:
        """Return whether the file that is open still has its name; True if none is open."""
        with self.lock, contextlib.suppress(OSError):
            return self.connection is None or os.stat(self.path).st_ino == self._inode
        return False

    def get(self, index: int) -> bytes | None:
        """Return the raw sample, or None. Raises Damaged if its bytes are not those that were stored."""
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
        """Take a sample out."""
        with self.opened() as connection:
            connection.execute("DELETE FROM sample WHERE id = ?", (self._first + index,))

    def put(self, samples: Sequence[tuple[int, bytes]]) -> int:
        """Store samples in one transaction, within the bound; those that are there stay. Return how many had room."""
        with self.opened() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                self._enter(connection)
                # The first samples for which there is room, or room is made.
                bound_bytes = self.bound_bytes - log_bytes(self.bound_bytes)
                used_bytes = _used_bytes(connection)
                sizes_bytes = [stored_bytes(len(raw)) for _, raw in samples]
                if used_bytes + sum(sizes_bytes) > bound_bytes:
                    used_bytes = self._evict(connection, bound_bytes - sum(sizes_bytes))
                rows = []
                for (index, raw), size_bytes in zip(samples, sizes_bytes, strict=True):
                    used_bytes += size_bytes
                    if used_bytes <= bound_bytes:
                        rows.append((self._first + index, _checksum(self._first + index, raw), raw))
                connection.executemany("INSERT OR IGNORE INTO sample VALUES (?, ?, ?)", rows)
                connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise
            return len(rows)

    def size_bytes(self) -> int:
        """Return the size of the file and its log."""
        sizes_bytes = []
        for suffix in SUFFIXES:
            with contextlib.suppress(OSError):
                sizes_bytes.append(self.path.with_name(FILE + suffix).stat().st_size)
        return sum(sizes_bytes)

    def _evict(self, connection: sqlite3.Connection, target_bytes: int) -> int:
        """Take samples out until at most `target_bytes` are used, if possible; return what is used.

        First datasets that no process has read for long, then samples of this one that are not `owned`: those that
        other nodes read now.
        """
        old = connection.execute(
            "SELECT id FROM dataset WHERE name != ? AND used_s < ? ORDER BY used_s",
            (self.dataset, time.time() - KEPT_FOR_S),
        ).fetchall()
        for (number,) in old:
            while _used_bytes(connection) > target_bytes:
                done = connection.execute(
                    "DELETE FROM sample WHERE id IN (SELECT id FROM sample WHERE id BETWEEN ? AND ? LIMIT 100)",
                    _ids(number << _NUMBER_BITS),
                )
                if not done.rowcount:
                    connection.execute("DELETE FROM dataset WHERE id = ?", (number,))
                    break
        if self.owned is not None and not self._swept:
            rows = connection.execute("SELECT id FROM sample WHERE id BETWEEN ? AND ?", _ids(self._first))
            numbers = np.array([number - self._first for (number,) in rows], dtype=np.int64)
            ids = [(self._first + index,) for index in numbers[~self.owned[numbers]].tolist()]
            while ids and _used_bytes(connection) > target_bytes:
                connection.executemany("DELETE FROM sample WHERE id = ?", ids[:100])
                ids = ids[100:]
            self._swept = not ids
        surplus = _value(connection, "PRAGMA page_count") - self.bound_bytes // PAGE_BYTES
        if surplus > 0:
            connection.execute(f"PRAGMA incremental_vacuum({surplus})").fetchall()
        return _used_bytes(connection)

    def forget(self) -> None:
        """Take all samples of the dataset out."""
        with self.opened() as connection:
            connection.execute("DELETE FROM sample WHERE id BETWEEN ? AND ?", _ids(self._first))

    def remove(self) -> None:
        """Remove the file, so that the next use makes a new one; not if another process just did."""
        with self.lock:
            there = self.is_there()
            self.close()
            if there:
                with self._file_lock():
                    for suffix in SUFFIXES:
                        self.path.with_name(FILE + suffix).unlink(missing_ok=True)


def existing(folder: Path) -> Path:
    """Return a directory, or the nearest one above it that exists."""
    return next((one for one in (folder, *folder.parents) if one.exists()), folder)


def stored_bytes(size_bytes: int) -> int:
    """Return what a sample of this size takes in the database at most."""
    return -(-(size_bytes + 64) // (PAGE_BYTES - 64)) * PAGE_BYTES


def log_bytes(bound_bytes: int) -> int:
    """Return the part of a bound that is for SQLite's log, which may exceed its limit by a batch, and its index."""
    return max(bound_bytes // _LOG_SHARE, 24 * PAGE_BYTES)


def batch_bytes(bound_bytes: int) -> int:
    """Return the largest size of one transaction of several samples."""
    return min(4 * 2**20, log_bytes(bound_bytes) // 4)


def least_bound_bytes(size_bytes: int) -> int:
    """Return the least bound under which one sample of this size is kept: tables and log need some pages, too."""
    return 24 * PAGE_BYTES + 3 * (8 * PAGE_BYTES + stored_bytes(size_bytes))


def _value(connection: sqlite3.Connection, question: str) -> int:
    found: int = connection.execute(question).fetchone()[0]
    return found


def _used_bytes(connection: sqlite3.Connection) -> int:
    return (_value(connection, "PRAGMA page_count") - _value(connection, "PRAGMA freelist_count")) * PAGE_BYTES


def _ids(first: int) -> tuple[int, int]:
    """Return the least and the largest id of a dataset's samples, by its first one."""
    return first, first + (1 << _NUMBER_BITS) - 1


def _checksum(number: int, raw: bytes) -> int:
    """Return CRC-32 over a sample's id and bytes: one that is found in another's place counts as damaged."""
    return zlib.crc32(raw, zlib.crc32(number.to_bytes(8, "little")))


_OPEN: weakref.WeakSet[Database] = weakref.WeakSet()
"""All databases of this process."""
_HELD: list[Database] = []
"""Databases that are locked while the process forks."""


# SQLite's connections must not be carried through a fork: they are closed before, while no other thread may use one.
def _before_fork() -> None:
    for database in list(_OPEN):
        database.lock.acquire()
        with contextlib.suppress(sqlite3.Error):
            database.close()
        database.connection = None
        _HELD.append(database)


def _after_fork() -> None:
    while _HELD:
        _HELD.pop().lock.release()


def _after_fork_in_child() -> None:
    while _HELD:
        _HELD.pop().lock = threading.RLock()  # the thread that held it is this one; others stayed with the parent


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
