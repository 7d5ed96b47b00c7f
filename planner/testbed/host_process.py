"""Runs a command on an emulated host; a script of its own: host_process.py PARENT NAMESPACE COMMAND ARGUMENT…

The command, and all that it starts, ends when this process does, and this process ends when its parent does, however
that ends: they are in a process namespace of their own, which the kernel empties when its first process is gone. Where
that cannot be had, the command takes the place of this process.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from typing import NoReturn

CLONE_NEWNET, CLONE_NEWPID, CLONE_NEWNS = 0x40000000, 0x20000000, 0x00020000
PR_SET_PDEATHSIG = 1
MS_PRIVATE, MS_REC = 1 << 18, 1 << 14
NOT_FOUND = 127
"""Exit code for a command that cannot be run, as shells have it."""


def main() -> NoReturn:
    """NAMESPACE is a descriptor, or -1 for this machine's network."""
    parent, namespace, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    if namespace >= 0:
        if libc.setns(namespace, CLONE_NEWNET) != 0:
            sys.exit(f"the emulated host cannot be entered: {os.strerror(ctypes.get_errno())}")
        os.close(namespace)
    if libc.unshare(CLONE_NEWPID | CLONE_NEWNS) != 0:
        run(command)
    alive, held = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(held)
        first_process(libc, alive, command)
    os.close(alive)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def first_process(libc: ctypes.CDLL, alive: int, command: list[str]) -> NoReturn:
    """Process 1 of the namespace: starts the command, waits for it, and buries what it leaves."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([alive], [], [], 0)[0]:  # at its end: the one before us has gone already
        os._exit(1)
    os.close(alive)
    libc.mount(None, b"/", None, MS_PRIVATE | MS_REC, None)
    libc.mount(b"proc", b"/proc", b"proc", 0, None)  # so that process numbers in it are those of the namespace
    child = os.fork()
    if child == 0:
        run(command)
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def run(command: list[str]) -> NoReturn:
    """Becomes the command."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(NOT_FOUND)


if __name__ == "__main__":
    main()
