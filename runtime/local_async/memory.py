"""What the processes of one rank share: memory, and counters that give each number to one process.

Both are anonymous files: they have no name that could be left behind, and are gone with the last process that holds
them. The only lock is the kernel's own on a file, which it takes back from a process that is killed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.reduction import DupFd
from typing import Any

import torch
from torch import Tensor

from runtime.errors import EnvironmentFailure

_FAR = 2**40


class _Anonymous:
    """A file without a name; sent to another process, it is the same file with the same position."""

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None and hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("local_async", os.MFD_CLOEXEC)
        elif descriptor is None:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _reopened, (type(self), DupFd(self.descriptor))


def _reopened(kind: Callable[[int], Any], descriptor: Any) -> Any:
    return kind(descriptor.detach())


class AtomicCounter(_Anonymous):
    """Counts over processes: `take` gives each number, from 0 on, to exactly one of them.

    The count is the position in a file that all of them have open together. Kernels do not promise that two processes
    that move it at once both do, so each locks the file for that microsecond: such a lock belongs to a process, and
    the kernel takes it back when one is killed.
    """

    def _move(self, by: int) -> int:
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
        try:
            return os.lseek(self.descriptor, by, os.SEEK_CUR)
        finally:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    def take(self) -> int:
        return self._move(1) - 1

    @property
    def value(self) -> int:
        return os.lseek(self.descriptor, 0, os.SEEK_CUR)

    def exhaust(self) -> None:
        """Give only numbers beyond all that are meant from now on."""
        self._move(_FAR)


class SharedMemory(_Anonymous):
    """Bytes that processes of this machine share, zeros at first."""

    def __init__(self, descriptor: int | None = None, size_bytes: int = 0) -> None:
        """Of `size_bytes` where it is made here. Raises EnvironmentFailure where the system has not so much memory."""
        super().__init__(descriptor)
        if descriptor is None:
            try:
                os.ftruncate(self.descriptor, max(1, size_bytes))
                if hasattr(os, "posix_fallocate"):  # or the first write into a page that cannot be had would kill us
                    os.posix_fallocate(self.descriptor, 0, max(1, size_bytes))
            except OSError as error:
                raise EnvironmentFailure(
                    f"this system gives no shared memory of {size_bytes} bytes ({error.strerror}); use fewer ranks on "
                    f"this machine, or a smaller model"
                ) from error
        self._map = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)

    def bytes(self) -> Tensor:
        """All of it. Shape (size_bytes,), uint8."""
        return torch.frombuffer(self._map, dtype=torch.uint8)


class Doorbell:
    """Wakes the process that waits for it (`multiprocessing.connection.wait`); who rings never waits."""

    def __init__(self, write: int | None = None) -> None:
        # Here both ends; in another process, to which this was sent, the end that rings.
        self._read = -1
        if write is None:
            self._read, write = os.pipe()
            os.set_blocking(self._read, False)
        os.set_blocking(write, False)
        self._write = write
        for descriptor in (self._read, self._write):
            if descriptor >= 0:
                weakref.finalize(self, os.close, descriptor).atexit = False

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _reopened, (Doorbell, DupFd(self._write))

    def fileno(self) -> int:
        return self._read

    def ring(self) -> None:
        # A full pipe has rung thousands of times: once more changes nothing.
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._write, b"!")

    def silence(self) -> None:
        with suppress(BlockingIOError):
            while len(os.read(self._read, 4096)) == 4096:
                pass
