"""Network namespaces without a name: they are held by open descriptors and by the processes in them, by nothing else.

So they vanish, with every interface in them, when the last of these processes ends, however it ends (`kill -9` too),
and no earlier run can have left anything behind. Entering one is a matter of the thread: the caller stays where it is.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.reduction import DupFd
from typing import Any, TypeVar

from runtime.errors import EnvironmentFailure

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000


class NoNamespaces(EnvironmentFailure):
    """Network namespaces are not available here; the message says what is missing."""


class Namespace:
    """One network namespace, by an open descriptor. Can be handed to a process that multiprocessing spawns."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def make(cls) -> Namespace:
        """Return a new one, empty but for a loopback interface that is down. Raises NoNamespaces."""
        return cls(_in_thread(_unshare))

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self.descriptor),)

    @property
    def path(self) -> str:
        """Return the name of the namespace for commands that inherit the descriptor."""
        return f"/proc/self/fd/{self.descriptor}"

    def enter(self) -> None:
        """Move the calling thread, and all threads and processes that it will start. Raises EnvironmentFailure."""
        if _libc().setns(self.descriptor, _CLONE_NEWNET) != 0:
            raise EnvironmentFailure(f"an emulated host cannot be entered: {os.strerror(ctypes.get_errno())}")

    def call(self, function: Callable[[], T]) -> T:
        """Call a function inside; sockets that it makes and processes that it starts stay inside."""

        def inside() -> T:
            self.enter()
            return function()

        return _in_thread(inside)

    def close(self) -> None:
        """Close the descriptor."""
        with suppress(OSError):
            os.close(self.descriptor)


def _received(descriptor: Any) -> Namespace:
    return Namespace(descriptor.detach())


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _unshare() -> int:
    """Move this thread into a new network namespace, and return its descriptor."""
    if not os.path.exists("/proc/thread-self/ns/net"):
        raise NoNamespaces("network namespaces are not here; they need Linux, with /proc")
    if _libc().unshare(_CLONE_NEWNET) != 0:
        why = os.strerror(ctypes.get_errno())
        raise NoNamespaces(
            f"a network namespace cannot be made ({why}): expected root with CAP_SYS_ADMIN and CAP_NET_ADMIN, found "
            f"user {os.geteuid()}; run as root (`sudo -E {sys.executable} -m planner …`; in a "
            f"container: with --privileged, or both capabilities)"
        )
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _in_thread(function: Callable[[], T]) -> T:
    # A thread of its own, which ends here: a namespace is entered for good.
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(function).result()
