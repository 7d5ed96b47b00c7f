"""Decoded samples in memory that the processes of one node share: ranks and their DataLoader workers.

Other ranks of the node open the memory through /proc, forked workers inherit it, spawned ones get its descriptor. What
is not published does not exist: a process that is killed while it writes leaves only bytes that the next writer
overwrites.
"""

from __future__ import annotations

import mmap
import os
from multiprocessing import context
from typing import Any

import numpy as np
from torch import Tensor

from runtime.comm.shared_memory import SharedMemory
from runtime.datacache.samples import ALIGNMENT
from runtime.errors import EnvironmentFailure, InputError

COUNTERS = (
    "memory_hits", "disk_hits", "source_reads", "fetched", "corrupted", "not_stored", "unstorable",
)  # fmt: skip
"""Names of the counters; each process counts in a row of its own, reports add the rows up."""

NOTICES = ("corrupted", "changed", "unstorable", "write", "read", "deleted", "read_only", "full", "old")
"""Names of the warnings that are given once on a node, by the process that meets them first."""

_ROWS = 512
"""Rows of counters; more processes than this share rows, and may lose a count now and then."""
_USED, _CLAIMED = range(2)
"""Words: bytes of the arena in use, rows claimed. Words of notices and rows of counters follow."""
_ROWS_AT = 2 + len(NOTICES)
_WORDS = _ROWS_AT + _ROWS * len(COUNTERS)


def overhead_bytes(slots: int) -> int:
    """Return the bytes that counters and the table of `slots` samples take, in whole pages."""
    return -(-8 * (_WORDS + 2 * slots) // mmap.PAGESIZE) * mmap.PAGESIZE


class NodeMemory:
    """Decoded samples of one node, the counters of its processes, and which warnings they have given.

    A sample that is held stays: when every epoch reads each sample once, evicting one for another gains nothing, and
    evicting the oldest would always hit the one that is needed next.
    """

    def __init__(self, memory: SharedMemory, slots: int) -> None:
        """Use shared memory with a table of `slots` samples; what is left is the arena of the samples' bytes."""
        self.slots = slots
        self._memory = memory
        self._words = memory.bytes()[: 8 * (_WORDS + 2 * slots)].numpy().view(np.int64)
        self._offsets = self._words[_WORDS : _WORDS + slots]
        """Offset of each slot's sample in the arena, plus 1; 0: there is none."""
        self._sizes = self._words[_WORDS + slots :]
        self._arena = memory.bytes()[overhead_bytes(slots) :]
        self._row, self._row_of = self._words[:0], 0
        """This process's counters, and the process that they were claimed by."""

    @classmethod
    def make(cls, slots: int, memory_bytes: int) -> NodeMemory:
        """Allocate at most `memory_bytes`; without slots if nothing is left for samples. Raises EnvironmentFailure."""
        arena_bytes = (memory_bytes - overhead_bytes(slots)) // ALIGNMENT * ALIGNMENT
        if arena_bytes <= 0:
            slots = arena_bytes = 0
        size_bytes = overhead_bytes(slots) + arena_bytes
        try:
            return cls(SharedMemory(size_bytes, reserve=False), slots)
        except OSError as error:
            raise EnvironmentFailure(
                f"memory_bytes: this system gives no shared memory of {size_bytes} bytes ({error}); give less"
            ) from error

    @property
    def address(self) -> tuple[int, int, int]:
        """Process, descriptor and slots, with which another process of the node opens this."""
        return os.getpid(), self._memory.descriptor, self.slots

    @classmethod
    def open(cls, address: tuple[int, int, int]) -> NodeMemory:
        """Open another rank's memory. Raises EnvironmentFailure if it cannot be seen, as from a container."""
        process, descriptor, slots = address
        try:
            return cls(SharedMemory.of_process(process, descriptor), slots)
        except OSError as error:
            raise EnvironmentFailure(
                f"cannot open the memory of process {process} of this node ({error.strerror}); where ranks cannot see "
                f"each other's processes, give each a `node` of its own"
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is None:
            raise InputError("a CachedDataset was pickled, expected it to stay on its node; only DataLoader workers "
                             "may be given one: make another where it is needed")  # fmt: skip
        return NodeMemory, (self._memory, self.slots)

    def get(self, slot: int) -> Tensor | None:
        """Return a copy of the flat sample at a slot (uint8), or None."""
        begin = int(self._offsets[slot]) - 1
        return None if begin < 0 else self._arena[begin : begin + int(self._sizes[slot])].clone()

    def put(self, slot: int, flat: Tensor) -> None:
        """Store a flat sample if there is room for it; one that is there stays."""
        size_bytes = flat.numel()
        if int(self._words[_USED]) + size_bytes > self._arena.numel():
            return
        with self._memory.locked():
            begin = int(self._words[_USED])
            if self._offsets[slot] or begin + size_bytes > self._arena.numel():
                return
            self._arena[begin : begin + size_bytes] = flat
            self._words[_USED] = begin + -(-size_bytes // ALIGNMENT) * ALIGNMENT
            self._sizes[slot] = size_bytes
            self._offsets[slot] = begin + 1  # from here on it exists

    def count(self, counter: str, number: int = 1) -> None:
        """Add to one of `COUNTERS`, without a lock."""
        if self._row_of != os.getpid():
            with self._memory.locked():
                row = int(self._words[_CLAIMED]) % _ROWS
                self._words[_CLAIMED] += 1
            self._row, self._row_of = self._rows[row], os.getpid()
        self._row[COUNTERS.index(counter)] += number

    def first(self, notice: str) -> bool:
        """Return whether no process of the node has given this one of `NOTICES`, which counts as given from now on."""
        word = 2 + NOTICES.index(notice)
        with self._memory.locked():
            given, self._words[word] = bool(self._words[word]), 1
        return not given

    @property
    def _rows(self) -> Any:
        return self._words[_ROWS_AT:_WORDS].reshape(_ROWS, len(COUNTERS))

    def counts(self) -> dict[str, int]:
        """Return the sums of all processes' counters."""
        return dict(zip(COUNTERS, self._rows.sum(axis=0).tolist(), strict=True))

    @property
    def held(self) -> int:
        """Number of samples held."""
        return int(np.count_nonzero(self._offsets))

    @property
    def used_bytes(self) -> int:
        """Memory that the system has allocated for this node, in bytes."""
        return self._memory.used_bytes
