"""Memory that the processes of one node share: ranks and their DataLoader workers.

It is one anonymous file (memfd): it has no name that could be left behind, does not count against the size of /dev/shm
(64 MB in many containers), and is gone with the last process that holds it. Other ranks of the node open it through
/proc, forked workers inherit it, spawned ones are given its descriptor.

Writers take a lock that the kernel gives back when its holder dies. What is not published does not exist: a process
that is killed while it writes leaves only bytes that the next writer overwrites.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import context, reduction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.datacache.samples import ALIGNMENT
from runtime.errors import EnvironmentFailure, InputError

COUNTERS = (
    "memory_hits", "disk_hits", "source_reads", "fetched", "corrupted", "not_stored", "unstorable",
)  # fmt: skip
"""What processes count, each in a row of its own; reports add rows up."""

NOTICES = ("corrupted", "changed", "unstorable", "write", "read", "deleted", "read_only", "full", "rebuilt")
"""What is said once on a node, whichever process meets it first."""

_ROWS = 512
"""More processes than this share rows, and may lose a count now and then."""
_USED, _HELD, _CLAIMED = 0, 1, 2
"""Words: bytes of the arena in use, samples held, rows claimed."""
_NOTICES_AT = 16
_ROWS_AT = 64
_WORDS = _ROWS_AT + _ROWS * len(COUNTERS)
_PAGE_BYTES = mmap.PAGESIZE


def overhead_bytes(slots: int) -> int:
    """What the memory of a node takes beside the samples: counters, and 16 bytes for each place."""
    return -(-(8 * _WORDS + 16 * slots) // _PAGE_BYTES) * _PAGE_BYTES


class NodeMemory:
    """Decoded samples of one node, with what its processes count and have said.

    A sample that is held stays: when every epoch reads each sample once, throwing one out for another gains nothing,
    and throwing out the oldest would always hit the one that is needed next.
    """

    def __init__(self, descriptor: int, slots: int, arena_bytes: int) -> None:
        """Map the file of a descriptor, which this object owns from now on: `slots` places for samples, one for each
        that the node may hold, and an arena of so many bytes.
        """
        self.slots, self.arena_bytes = slots, arena_bytes
        self.descriptor = descriptor
        start = overhead_bytes(slots)
        self._map = mmap.mmap(descriptor, start + arena_bytes)
        weakref.finalize(self, os.close, descriptor).atexit = False
        words = np.frombuffer(self._map, dtype=np.int64, count=_WORDS + 2 * slots)
        self._words = words[:_WORDS]
        self._offsets = words[_WORDS : _WORDS + slots]
        """Per slot: where the sample begins in the arena, plus 1; 0: there is none."""
        self._sizes = words[_WORDS + slots :]
        self._arena = torch.frombuffer(self._map, dtype=torch.uint8)[start:]
        self._threads = threading.Lock()
        self._owner = 0
        self._row = self._words[:0]

    @classmethod
    def make(cls, slots: int, memory_bytes: int) -> NodeMemory:
        """Make memory of at most `memory_bytes`, without an arena where nothing is left for one. Raises
        EnvironmentFailure.
        """
        arena_bytes = (memory_bytes - overhead_bytes(slots)) // ALIGNMENT * ALIGNMENT
        if arena_bytes <= 0:
            slots = arena_bytes = 0
        size_bytes = overhead_bytes(slots) + arena_bytes
        try:
            descriptor = os.memfd_create("datacache", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size_bytes)
            return cls(descriptor, slots, arena_bytes)
        except (OSError, AttributeError) as error:
            raise EnvironmentFailure(
                f"memory_bytes: this system gives no shared memory of {size_bytes} bytes ({error}); give less"
            ) from error

    @property
    def address(self) -> tuple[int, int, int, int]:
        """What another process of the node needs to open this: process, descriptor, slots and bytes of the arena."""
        return os.getpid(), self.descriptor, self.slots, self.arena_bytes

    @classmethod
    def open(cls, address: tuple[int, int, int, int]) -> NodeMemory:
        """Open another rank's memory. Raises EnvironmentFailure where it cannot be seen, as from a container."""
        process, descriptor, slots, arena_bytes = address
        try:
            return cls(os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC), slots, arena_bytes)
        except OSError as error:
            raise EnvironmentFailure(
                f"cannot open the memory of process {process} of this node ({error.strerror}); where ranks cannot see "
                f"each other's processes, give each a `node` of its own"
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is None:
            raise InputError("a CachedDataset was pickled, expected it to stay on its node; only DataLoader workers "
                             "may be given one: make another where it is needed")  # fmt: skip
        return _rebuild, (reduction.DupFd(self.descriptor), self.slots, self.arena_bytes)

    def get(self, slot: int) -> Tensor | None:
        """A copy of the flat sample at a slot (uint8), or None."""
        begin = int(self._offsets[slot]) - 1
        if begin < 0:
            return None
        return self._arena[begin : begin + int(self._sizes[slot])].clone()

    def holds(self, slot: int) -> bool:
        return bool(self._offsets[slot])

    def put(self, slot: int, flat: Tensor) -> bool:
        """Store a flat sample; False where no room is left for it. One that is there stays."""
        size_bytes = flat.numel()
        if int(self._words[_USED]) + size_bytes > self.arena_bytes:
            return False
        with self.locked():
            begin = int(self._words[_USED])
            if self._offsets[slot] or begin + size_bytes > self.arena_bytes:
                return bool(self._offsets[slot])
            self._arena[begin : begin + size_bytes] = flat
            self._words[_USED] = begin + -(-size_bytes // ALIGNMENT) * ALIGNMENT
            self._words[_HELD] += 1
            self._sizes[slot] = size_bytes
            self._offsets[slot] = begin + 1  # from here on it exists
        return True

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be alone among all threads and processes of the node."""
        if self._owner != os.getpid():
            self._begin()
        with self._threads:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    def _begin(self) -> None:
        """In a process that has not used this yet: a thread of its parent may have held the lock when it was forked."""
        self._owner, self._threads = os.getpid(), threading.Lock()
        with self.locked():
            row = int(self._words[_CLAIMED]) % _ROWS
            self._words[_CLAIMED] += 1
        self._row = self._words[_ROWS_AT + row * len(COUNTERS) :][: len(COUNTERS)]

    def count(self, counter: str, number: int = 1) -> None:
        if self._owner != os.getpid():
            self._begin()
        self._row[_PLACE[counter]] += number

    def first(self, notice: str) -> bool:
        """Whether nobody on this node has said this one of `NOTICES`; it counts as said from now on."""
        place = _NOTICES_AT + NOTICES.index(notice)
        with self.locked():
            said, self._words[place] = bool(self._words[place]), 1
        return not said

    def counts(self) -> dict[str, int]:
        """What all processes of the node have counted."""
        rows = self._words[_ROWS_AT:].reshape(_ROWS, len(COUNTERS)).sum(axis=0)
        return dict(zip(COUNTERS, map(int, rows), strict=True))

    @property
    def held(self) -> int:
        return int(self._words[_HELD])

    @property
    def used_bytes(self) -> int:
        """What the node's memory takes from the system now."""
        return os.fstat(self.descriptor).st_blocks * 512


_PLACE = {name: place for place, name in enumerate(COUNTERS)}


def _rebuild(descriptor: Any, slots: int, arena_bytes: int) -> NodeMemory:
    return NodeMemory(descriptor.detach(), slots, arena_bytes)


def available_bytes() -> int:
    """Memory that this node could still give, by the kernel's estimate and the limit of the control group."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    left = [free]
    for limit, used in (  # what the process's control group leaves, where it sets a limit (version 2, then 1)
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError), open(limit, encoding="ascii") as one, open(used, encoding="ascii") as other:
            left.append(max(0, int(one.read()) - int(other.read())))  # no such group, or no limit ("max"): ValueError
    return min(left)
