"""Level 1: raw samples of slow storage on the local disk, shared by the processes of a node and by later runs.

    local_dir/DATASET/THOUSANDS/INDEX   one file for each sample: a checksum (4 bytes) and its raw bytes
    local_dir/used                      the size of all of them, in bytes
    local_dir/lock                      held while one is put in its place or evicted

A sample is written under another name first, so that readers need no lock and a killed writer leaves nothing torn. A
disk that does not work never stops a run: whatever goes wrong here, samples come from the storage again, which is
counted, and a warning is given once on the node.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import shutil
import threading
import time
import warnings
import weakref
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from runtime.datacache.memory import NodeMemory
from runtime.errors import CacheWarning

LOCK, USED, UNFINISHED = "lock", "used", ".new"
OLD_FILES = ("samples.sqlite", "samples.sqlite-wal", "samples.sqlite-shm", "samples.lock")
"""Files of versions that kept all samples in one database."""
BLOCK_BYTES = 4096
PER_FOLDER = 1000
"""Samples in one folder."""
BUSY_S = 10.0
"""Longest wait for the lock, in seconds."""
KEPT_FOR_S = 600.0
"""A dataset that was read within this time, in seconds, is in use: another one does not evict it."""
WAITING_BYTES = 32 * 2**20
"""Bound of the samples that wait to be written, in each process; if the disk is slower, others are not kept."""
GATHER_S = 0.05
"""Seconds for which samples are gathered that are then written with one lock."""
PAUSE_S = 30.0
"""Seconds without writing after a failure, or once the bound is reached."""
TOUCH_S = 60.0
"""Seconds between two records that the dataset is in use."""
FLUSH_S = 4.0
"""Seconds that a process at its end waits for what is not written yet; DataLoader gives its workers 5 s."""
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskStore:
    """The local disk of a node, for one dataset. Methods raise nothing but warnings that are turned into errors."""

    def __init__(
        self, folder: Path, bound_bytes: int, dataset: str, memory: NodeMemory, owned: np.ndarray | None = None
    ) -> None:
        """Touch nothing on the disk yet.

        Args:
            folder: the directory that all datasets share.
            bound_bytes: bound of all files in it.
            dataset: tells this dataset from others.
            memory: counts, and remembers which warnings were given.
            owned: whether this node reads each sample (bool); None: all.
        """
        self._given = folder, bound_bytes, dataset, memory, owned
        self.folder, self.bound_bytes = folder, bound_bytes
        self._own = folder / hashlib.sha1(dataset.encode()).hexdigest()
        self._memory, self._owned = memory, owned
        self._begin()

    def __reduce__(self) -> tuple[Any, ...]:
        return DiskStore, self._given

    def _begin(self) -> None:
        """Start in a process that has not used this yet: what its parent was to write, the parent writes."""
        self._process = os.getpid()
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self._idle = threading.Condition()
        self._lock = FileLock(self.folder / LOCK, timeout=BUSY_S)
        self._writing = self._seen = False
        self._paused_until_s = self._unread_until_s = self._touch_at_s = 0.0
        # Runs at the end of DataLoader workers too, which atexit's functions do not.
        util.Finalize(None, _flush, args=(weakref.ref(self),), exitpriority=100)

    def _path(self, index: int) -> str:
        return f"{self._own}/{index // PER_FOLDER}/{index}"

    def get(self, index: int) -> bytes | None:
        """Return the raw sample, or None if it is not there, or damaged, or the disk does not work."""
        if self._process != os.getpid():
            self._begin()
        now_s = time.monotonic()
        if now_s < self._unread_until_s:
            return None
        path = self._path(index)
        try:
            with open(path, "rb", buffering=0) as file:
                content = file.read()
        except FileNotFoundError:
            if self._seen and not self._own.exists():
                self._seen = False
                self._warn("deleted", f"{self._own} was deleted while in use; it is made and filled again")
            return None
        except OSError as error:
            self._unread_until_s = now_s + PAUSE_S
            self._failed(error, "read")
            return None
        self._seen = True
        raw = content[4:]
        if content[:4] != _checksum(index, raw):
            self._memory.count("corrupted")
            self._warn(
                "corrupted",
                f"{path}: the bytes of sample {index} are not those that were stored; it is read again from the "
                f"storage. Check the disk; stats().corrupted counts further ones",
            )
            with suppress(OSError):
                self._remove([Path(path)])
            return None
        if now_s >= self._touch_at_s:
            self._touch_at_s = now_s + TOUCH_S
            with suppress(OSError):
                os.utime(self._own)
        return raw

    def put(self, index: int, raw: bytes) -> None:
        """Store a raw sample some time later; if that cannot be, count it."""
        if self._process != os.getpid():
            self._begin()
        if self._waiting and self._waiting_bytes + len(raw) > WAITING_BYTES:
            self._memory.count("not_stored")
            return
        with self._idle:
            self._waiting.append((index, raw))
            self._waiting_bytes += len(raw)
            self._start_writer()

    def _start_writer(self) -> None:
        """Have a thread write what waits, unless one does; called with the lock."""
        if self._waiting and not self._writing:
            self._writing = True
            threading.Thread(target=self._write_all, name="datacache", daemon=True).start()

    def _write_all(self) -> None:
        try:
            while self._waiting:
                time.sleep(GATHER_S)
                batch = [self._waiting.popleft() for _ in range(len(self._waiting))]
                self._waiting_bytes -= sum(len(raw) for _, raw in batch)
                self._write(batch)
        finally:
            with self._idle:
                self._writing = False
                self._start_writer()  # for what was put meanwhile
                self._idle.notify_all()

    def _write(self, batch: Sequence[tuple[int, bytes]]) -> None:
        stored, paused = 0, time.monotonic() < self._paused_until_s
        try:
            for _ in () if paused else self._store(batch):
                stored += 1
        except OSError as error:
            self._failed(error, "write")
        finally:
            self._memory.count("not_stored", len(batch) - stored)
            if stored < len(batch) and not paused:
                self._paused_until_s = time.monotonic() + PAUSE_S

    def _store(self, batch: Sequence[tuple[int, bytes]]) -> Iterator[int]:
        """Write samples, and yield the index of each that is stored, until there is no room for one."""
        self._own.mkdir(parents=True, exist_ok=True)
        self._seen = True
        unfinished = [f"{self.folder}/{os.getpid()}-{index}{UNFINISHED}" for index, _ in batch]
        try:
            for name, (index, raw) in zip(unfinished, batch, strict=True):
                with open(name, "wb") as file:
                    file.write(_checksum(index, raw) + raw)
            with self._lock:
                total_bytes = used_bytes(self.folder)
                # Counted before they are in place: what a killed process leaves is never more than is counted.
                self._set_used(total_bytes + sum(stored_bytes(len(raw)) for _, raw in batch))
                try:
                    for name, (index, raw) in zip(unfinished, batch, strict=True):
                        path = self._path(index)
                        if not os.path.exists(path):
                            excess_bytes = total_bytes + least_bound_bytes(len(raw)) - self.bound_bytes
                            if excess_bytes > 0:
                                freed_bytes = self._evict(self._evictable(), excess_bytes)
                                total_bytes -= freed_bytes
                                if freed_bytes < excess_bytes:
                                    return
                            _move(name, path)
                            total_bytes += stored_bytes(len(raw))
                        yield index
                finally:
                    self._set_used(total_bytes)
        finally:
            for name in unfinished:
                with suppress(FileNotFoundError):
                    os.unlink(name)

    def _set_used(self, total_bytes: int) -> None:
        file = os.open(self.folder / USED, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            # In place: some file systems write a file that was cut off and written again to the disk at once.
            os.pwrite(file, f"{total_bytes:<20}".encode(), 0)
        finally:
            os.close(file)

    def _evictable(self) -> Iterator[Path]:
        """Yield samples of datasets that no process has read for long, then those of this one that other nodes read."""
        old_s = time.time() - KEPT_FOR_S
        found = []
        for one in self.folder.iterdir():
            with suppress(FileNotFoundError):  # an unfinished file of another process, which is done with it
                found.append((one.stat().st_mtime, one))
        for used_s, folder in sorted(found):
            if used_s < old_s and folder.name.endswith(UNFINISHED):  # of a killed process
                if not folder.name.startswith(f"{os.getpid()}-"):
                    folder.unlink(missing_ok=True)
            elif used_s < old_s and folder.is_dir() and folder != self._own:
                yield from folder.glob("*/*")
                shutil.rmtree(folder)
        if self._owned is not None:
            yield from (path for path in self._own.glob("*/*") if not self._owned[int(path.name)])

    def _evict(self, paths: Iterable[Path], wanted_bytes: float = math.inf) -> int:
        """Remove samples until `wanted_bytes` and some more are free; return the freed bytes. Called with the lock."""
        freed_bytes = 0
        for path in paths:
            freed_bytes += stored_bytes(path.stat().st_size - 4)
            path.unlink()
            if freed_bytes >= wanted_bytes + self.bound_bytes // 64:
                break
        return freed_bytes

    def _remove(self, paths: Iterable[Path]) -> None:
        with self._lock:
            freed_bytes = self._evict(paths)
            self._set_used(used_bytes(self.folder) - freed_bytes)

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until all that this process has put is on the disk, or given up; return False after the timeout."""
        if self._process != os.getpid():
            return True
        with self._idle:
            return self._idle.wait_for(lambda: not self._writing, timeout_s)

    def _failed(self, error: OSError, doing: str) -> None:
        """Warn of what is wrong with the disk."""
        if doing == "write" and error.errno in READ_ONLY:
            self._warn(
                "read_only",
                f"local_dir {self.folder}: cannot be written to; samples that are there are used, new ones are not "
                f"stored. Make it writable, or name another directory",
            )
        elif error.errno in FULL:
            self._warn(
                "full",
                f"local_dir {self.folder}: the disk is full; no more samples are stored, those that are there are "
                f"used. Free some space, or give a smaller disk_bytes",
            )
        else:
            self._warn(
                doing,
                f"local_dir {self.folder}: cannot {doing} samples ({error}); they come from the storage. Check the "
                f"disk and its permissions",
            )

    def _warn(self, notice: str, text: str) -> None:
        """Give a warning, once on the node."""
        if self._memory.first(notice):
            warnings.warn(text, CacheWarning, stacklevel=2)

    def compare(self, samples: Mapping[int, bytes]) -> None:
        """Throw the dataset's samples away if those that are stored are not what the storage has now."""
        if all(self.get(index) in (None, raw) for index, raw in samples.items()):
            return
        try:
            self._remove(self._own.glob("*/*"))
        except OSError:  # it cannot be written to
            self._unread_until_s = math.inf
        self._warn(
            "changed",
            f"local_dir {self.folder}: the dataset has changed since its samples were stored there under this "
            f"name; they are not used, and stored anew",
        )


def remove_old_files(folder: Path, memory: NodeMemory) -> None:
    """Delete the database of an older version, whose bytes count towards no bound; `memory` remembers the warning."""
    found = [path for path in (folder / name for name in OLD_FILES) if path.exists()]
    deleted = "it was deleted, and samples are stored anew"
    try:
        for path in found:
            path.unlink()
    except OSError as error:
        deleted = f"it cannot be deleted ({error}): delete it"
    if found and memory.first("old"):
        text = f"local_dir {folder}: found {found[0].name} of an older version, which is not read any more; {deleted}"
        warnings.warn(text, CacheWarning, stacklevel=2)


def _move(name: str, path: str) -> None:
    """Move a file to its place, whose directory is made where it is missing."""
    try:
        os.replace(name, path)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.replace(name, path)


def used_bytes(folder: Path) -> int:
    """Return the size of all samples in a cache's directory, in whole blocks."""
    try:
        return int((folder / USED).read_text(encoding="ascii"))
    except (OSError, ValueError):  # new, or cut off
        return sum(stored_bytes(path.stat().st_size - 4) for path in folder.glob("*/*/*"))


def stored_bytes(size_bytes: int) -> int:
    """Return what a raw sample of this size takes on the disk."""
    return -(-(size_bytes + 4) // BLOCK_BYTES) * BLOCK_BYTES


def least_bound_bytes(size_bytes: int) -> int:
    """Return the least bound under which one sample of this size is kept."""
    return stored_bytes(size_bytes) + BLOCK_BYTES


def existing(folder: Path) -> Path:
    """Return a directory, or the nearest one above it that exists."""
    return next((one for one in (folder, *folder.parents) if one.exists()), folder)


def _checksum(index: int, raw: bytes) -> bytes:
    """Return CRC-32 over a sample's index and bytes: one that is found in another's place counts as damaged."""
    return zlib.crc32(raw, zlib.crc32(index.to_bytes(8, "little"))).to_bytes(4, "little")


def _flush(store: weakref.ref[DiskStore]) -> None:
    alive = store()
    if alive is not None:
        alive.flush(FLUSH_S)
