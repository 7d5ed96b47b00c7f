"""Memory that processes of one machine share, and how much of it the machine can still give."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.reduction import DupFd
from typing import Any, Self

import torch
from torch import Tensor


class SharedMemory:
    """Bytes that processes share, zero at first: an anonymous file (memfd), freed with the last process that holds it.

    It has no name that could be left behind, and does not count against the size of /dev/shm (64 MB in many
    containers). Forked processes inherit it; a process that `multiprocessing` spawns gets its descriptor.
    """

    def __init__(self, size_bytes: int = 0, *, reserve: bool = True, descriptor: int | None = None) -> None:
        """Allocate `size_bytes`, or map the file of `descriptor`, which this object owns from now on.

        Args:
            size_bytes: size of new memory.
            reserve: allocate all pages now, so that a later write cannot end the process for want of memory.
            descriptor: an open file of another process.

        Raises:
            OSError: the system does not give so much memory.
        """
        made = descriptor is None
        self.descriptor = _anonymous_file() if descriptor is None else descriptor
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        if made:
            os.ftruncate(self.descriptor, max(1, size_bytes))
            if reserve and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.descriptor, 0, max(1, size_bytes))
        self._map = mmap.mmap(self.descriptor, 0)
        self._threads, self._process = threading.Lock(), os.getpid()

    @classmethod
    def of_process(cls, process: int, descriptor: int) -> Self:
        """Open the memory that another process has under `descriptor`. Raises OSError if that cannot be seen."""
        return cls(descriptor=os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _reopened, (type(self), DupFd(self.descriptor))

    def bytes(self) -> Tensor:
        """Return all bytes, as a view. Shape (size_bytes,), uint8."""
        return torch.frombuffer(self._map, dtype=torch.uint8)

    @property
    def used_bytes(self) -> int:
        """Memory that the system has allocated, in bytes."""
        return os.fstat(self.descriptor).st_blocks * 512

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of all threads and processes that share this; the kernel takes it back from a killed one."""
        if self._process != os.getpid():  # a thread of the parent may have held the lock at the fork
            self._threads, self._process = threading.Lock(), os.getpid()
        with self._threads:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self.descriptor, fcntl.LOCK_UN)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("planner", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _reopened(kind: type[SharedMemory], descriptor: Any) -> SharedMemory:
    return kind(descriptor=descriptor.detach())


def available_bytes() -> int:
    """Return the memory that this machine can still give, by the kernel's estimate and the control group's limit."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    left = [free]
    for limit, used in (  # control groups of version 2, then 1
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError), open(limit, encoding="ascii") as one, open(used, encoding="ascii") as other:
            left.append(max(0, int(one.read()) - int(other.read())))  # no such group, or no limit ("max"): ValueError
    return min(left)
