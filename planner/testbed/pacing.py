"""TCP connections of this process held to a rate by the kernel, which needs no root. Torch-free."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from runtime.errors import EnvironmentFailure

SO_MAX_PACING_RATE = 47
"""Linux's option of a socket, in bytes per second, which Python's `socket` does not name."""
DESCRIPTORS = Path("/proc/self/fd")


def pace_connections(bits_per_s: float) -> None:
    """Hold what each TCP connection of this process sends to a rate; call it again once others were opened.

    Raises:
        EnvironmentFailure: the kernel does not pace connections.
    """
    if not DESCRIPTORS.exists():
        raise EnvironmentFailure("found no /proc/self/fd: connections are held to a rate on Linux alone; use Linux")
    for descriptor in map(int, os.listdir(DESCRIPTORS)):
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            copy = os.dup(descriptor)
        except OSError:  # closed meanwhile
            continue
        with socket.socket(fileno=copy) as connection:
            if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            try:
                connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, round(bits_per_s / 8))
            except OSError as error:
                if error.errno not in (errno.ENOPROTOOPT, errno.EOPNOTSUPP):
                    raise
                raise EnvironmentFailure(
                    f"the kernel cannot hold connections to a rate (SO_MAX_PACING_RATE: {error.strerror}); expected "
                    f"Linux 4.13 or newer, or, as root, an emulated cluster: --emulate 2x1@10gbit"
                ) from error
