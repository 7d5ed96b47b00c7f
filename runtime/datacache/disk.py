"""Level 1: raw samples of slow storage on the local disk, shared by the processes of a node and by later runs.

A disk that does not work never stops a run: whatever goes wrong here, samples come from the storage again, which is
counted, and a warning is given once on the node.
"""

from __future__ import annotations

import errno
import math
import os
import sqlite3
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from typing import Any

import numpy as np

from runtime.datacache.database import DAMAGED, FILE, Damaged, Database, batch_bytes
from runtime.datacache.memory import NodeMemory
from runtime.errors import CacheWarning

WAITING_BYTES = 32 * 2**20
"""Bound of the samples that wait to be written, in each process; if the disk is slower, others are not kept."""
PAUSE_S = 30.0
"""Seconds without writing after a failure, or once the bound is reached."""
LOOK_S = 1.0
"""Seconds between two checks that the file is still there."""
TOUCH_S = 60.0
"""Seconds after which a process that only reads records that the dataset is in use."""
LINGER_S = 0.1
"""Seconds that the first sample to be written waits for others."""
FLUSH_S = 4.0
"""Seconds that a process at its end waits for what is not written yet; DataLoader gives its workers 5 s."""


class DiskStore:
    """The local disk of a node, for one dataset. Methods raise nothing but warnings that are turned into errors."""

    def __init__(
        self, folder: Path, bound_bytes: int, dataset: str, memory: NodeMemory, owned: np.ndarray | None = None
    ) -> None:
        """Open nothing yet; see `Database`. `memory` counts, and remembers which warnings were given."""
        self._given = folder, bound_bytes, dataset, memory, owned
        self.folder = folder
        self.bound_bytes = bound_bytes
        self._memory = memory
        self._batch_bytes = batch_bytes(bound_bytes)
        # Readers do not wait for writers if each has a connection.
        self._reader = Database(folder, bound_bytes, dataset, owned)
        self._writer = Database(folder, bound_bytes, dataset, owned)
        self._begin()

    def __reduce__(self) -> tuple[Any, ...]:
        return DiskStore, self._given

    def _begin(self) -> None:
        """Start in a process that has not used this yet: what its parent was to write, the parent writes."""
        self._process = os.getpid()
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self._wake = threading.Condition()
        self._writing = self._touch = self._hurry = False
        self._paused_until_s = self._unread_until_s = self._look_at_s = 0.0
        self._touch_at_s = time.monotonic() + TOUCH_S
        # Runs at the end of DataLoader workers too, which atexit's functions do not.
        util.Finalize(None, _flush, args=(weakref.ref(self),), exitpriority=100)

    def get(self, index: int) -> bytes | None:
        """Return the raw sample, or None if it is not there, or damaged, or the disk does not work."""
        if self._process != os.getpid():
            self._begin()
        now_s = time.monotonic()
        if now_s < self._unread_until_s:
            return None
        try:
            if now_s >= self._look_at_s:
                self._look_at_s = now_s + LOOK_S
                if not self._reader.is_there():
                    self._reader.close()
                    self._warn("deleted", f"{self._reader.path} was deleted while in use; a new one is made, and "
                                          f"filled again")  # fmt: skip
            raw = self._reader.get(index)
        except Damaged:
            self._memory.count("corrupted")
            self._warn(
                "corrupted",
                f"{self._reader.path}: the bytes of sample {index} are not those that were stored; it is read "
                f"again from the storage. Check the disk; stats().corrupted counts further ones",
            )
            try:
                if not self._reader.read_only:
                    self._reader.delete(index)
            except (sqlite3.Error, OSError) as error:
                self._failed(error, "write", self._reader)
            return None
        except (sqlite3.Error, OSError) as error:
            self._unread_until_s = time.monotonic() + PAUSE_S
            self._failed(error, "read", self._reader)
            return None
        if raw is not None and now_s >= self._touch_at_s:
            self._touch_at_s, self._touch = now_s + TOUCH_S, True
            with self._wake:
                self._start_writer()
        return raw

    def missing(self, indices: Sequence[int]) -> set[int]:
        """Return which samples of a batch need not be looked for; none if the disk does not work, as `get` finds."""
        # If it is time to look for the file, `get` finds out whether it is still there.
        if self._process == os.getpid() and indices and self._unread_until_s <= time.monotonic() < self._look_at_s:
            with suppress(sqlite3.Error, OSError):
                return self._reader.missing(indices)
        return set()

    def put(self, index: int, raw: bytes) -> None:
        """Store a raw sample some time later; if that cannot be, count it."""
        if self._process != os.getpid():
            self._begin()
        many = self._waiting and self._waiting_bytes + len(raw) > WAITING_BYTES
        if many or time.monotonic() < self._paused_until_s:
            self._memory.count("not_stored")
            return
        with self._wake:
            self._waiting.append((index, raw))
            self._waiting_bytes += len(raw)
            self._start_writer()

    def _start_writer(self) -> None:
        """Have a thread write what waits, unless one does; called with the lock."""
        if not self._writing:
            self._writing = True
            threading.Thread(target=self._write_all, name="datacache", daemon=True).start()
        elif self._waiting_bytes >= self._batch_bytes:
            self._wake.notify_all()

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until all that this process has put is on the disk, or given up; return False after the timeout."""
        if self._process != os.getpid():
            return True
        with self._wake:
            self._hurry = True
            self._wake.notify_all()
            done = self._wake.wait_for(lambda: not self._writing, timeout_s)
            self._hurry = False
            return done

    def _write_all(self) -> None:
        """Write what waits, one batch after the other, until nothing does."""
        try:
            while (batch := self._next_batch()) is not None:
                self._write(batch)
        except BaseException:
            with self._wake:
                self._writing = False
                self._wake.notify_all()
            raise

    def _next_batch(self) -> list[tuple[int, bytes]] | None:
        """Return the next samples to write in one transaction; None, and no thread writes any more, if none wait."""
        with self._wake:
            # A transaction costs as much as some samples, so it waits for a few.
            self._wake.wait_for(lambda: self._hurry or self._waiting_bytes >= self._batch_bytes, LINGER_S)
            batch: list[tuple[int, bytes]] = []
            size_bytes = 0
            while self._waiting and (not batch or size_bytes + len(self._waiting[0][1]) <= self._batch_bytes):
                batch.append(self._waiting.popleft())
                size_bytes += len(batch[-1][1])
            self._waiting_bytes -= size_bytes
            if not batch and not self._touch:
                self._writing = False
                self._wake.notify_all()
                return None
            self._touch = False
            return batch

    def _write(self, batch: list[tuple[int, bytes]]) -> None:
        stored = 0
        try:
            if not self._writer.is_there():
                self._writer.close()
            with self._writer.opened():
                if self._writer.read_only:
                    self._warn_read_only()
                else:
                    stored = self._writer.put(batch)
        except (sqlite3.Error, OSError) as error:
            self._pause(len(batch))
            self._failed(error, "write", self._writer)
            return
        if stored < len(batch):
            self._pause(len(batch) - stored)

    def _pause(self, not_stored: int) -> None:
        """Count samples that were not stored, and write nothing for a while."""
        self._memory.count("not_stored", not_stored)
        self._paused_until_s = time.monotonic() + PAUSE_S

    def _failed(self, error: Exception, doing: str, database: Database) -> None:
        """Warn of what is wrong with the disk; a damaged file is made anew."""
        name = getattr(error, "sqlite_errorname", "") or ""
        if name.startswith(DAMAGED) or isinstance(error, sqlite3.NotSupportedError):
            self._warn(
                "rebuilt", f"{database.path} is damaged ({error}); a new one is made, and filled again. Check the disk"
            )
            with suppress(OSError):  # a warning was given; the next try comes after a pause
                database.remove()
                self._unread_until_s = self._paused_until_s = 0.0
        elif not database.path.exists() and database.read_only:
            self._warn_read_only()
        elif name == "SQLITE_FULL" or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            self._warn(
                "full",
                f"local_dir {self.folder}: the disk is full; no more samples are stored, those that are there are "
                f"used. Free some space, or give a smaller disk_bytes",
            )
        else:
            self._warn(
                doing,
                f"local_dir {self.folder}: cannot {doing} {FILE} ({error}); samples come from the storage. "
                f"Check the disk and its permissions",
            )

    def _warn_read_only(self) -> None:
        self._warn(
            "read_only",
            f"local_dir {self.folder}: cannot be written to; samples that are there are used, new ones are not "
            f"stored. Make it writable, or name another directory",
        )

    def _warn(self, notice: str, text: str) -> None:
        """Give a warning, once on the node."""
        if self._memory.first(notice):
            warnings.warn(text, CacheWarning, stacklevel=2)

    def compare(self, samples: Mapping[int, bytes]) -> None:
        """Throw the dataset's samples away if those that are stored are not what the storage has now."""
        try:
            stored = [(self._reader.get(index), raw) for index, raw in samples.items()]
            if all(found is None or found == raw for found, raw in stored):
                return
            if self._reader.read_only:
                self._unread_until_s = math.inf
            else:
                self._reader.forget()
        except Damaged:
            return  # found again when that sample is read
        except (sqlite3.Error, OSError) as error:
            self._failed(error, "read", self._reader)
            return
        self._warn(
            "changed",
            f"local_dir {self.folder}: the dataset has changed since its samples were stored there under this "
            f"name; they are not used, and stored anew",
        )

    def used_bytes(self) -> int:
        """Return the size of the database and its log."""
        return self._reader.size_bytes()

    def close(self) -> None:
        """Write what waits, and release the file."""
        self.flush()
        for database in (self._reader, self._writer):
            try:
                database.close()
            except sqlite3.Error as error:
                self._failed(error, "write", database)


def _flush(store: weakref.ref[DiskStore]) -> None:
    alive = store()
    if alive is not None:
        alive.flush(FLUSH_S)
