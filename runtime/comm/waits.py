"""Waits of a rank for others: during a long wait it looks at their processes, and warns once.

A rank that computes for long outside of a step (validation, saving) looks to the others like one that hangs. What can
be told apart is whether its process runs: a stopped or ended one does not, and on the same machine the kernel says so,
without a thread, a message or the interpreter of the rank in question. What runs is waited for, as DDP would.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from runtime.errors import CommunicationError, LongWaitWarning
from runtime.torch_compat import wait_for

if TYPE_CHECKING:
    from runtime.comm.world import World

GRACE_S = 5.0
"""Seconds that the waiting thread adds to the backend's own deadline."""
LOOKS = 6
"""Number of looks at other processes until a wait is long; one that does not run in that many in a row is lost."""


@dataclass(frozen=True)
class RankProcess:
    """The process that a rank is."""

    rank: int
    machine: str
    """Names what numbers processes: a boot of a machine, and a namespace of processes on it."""
    pid: int
    started: str
    """Start time in ticks since boot: numbers of processes are reused."""

    @classmethod
    def here(cls, rank: int) -> RankProcess | None:
        """Return this process; None where the system has no /proc (not on Linux)."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        except OSError:
            return None
        found = _state_of(os.getpid())
        return None if found is None else cls(rank, machine, os.getpid(), found[1])

    def is_neighbour_of(self, other: RankProcess) -> bool:
        """Return whether both are other processes of one machine."""
        return self.machine == other.machine and self.rank != other.rank

    def fate(self) -> str:
        """Return why the process does not run, in words; empty where it does, or where that cannot be known."""
        try:
            found = _state_of(self.pid)
        except FileNotFoundError:
            return "has ended"
        if found is None:
            return ""
        state, started = found
        if started != self.started or state in "ZX":
            return "has ended"
        return "is stopped (SIGSTOP)" if state == "T" else ""


def is_stopped(pid: int | None) -> bool:
    """Return whether a signal has stopped the process; False where that cannot be known (not on Linux)."""
    try:
        found = None if pid is None else _state_of(pid)
    except FileNotFoundError:
        return False
    return found is not None and found[0] == "T"


def _state_of(pid: int) -> tuple[str, str] | None:
    """(state, when it was started) of a process; None where it cannot be read. Raises FileNotFoundError."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        raise FileNotFoundError(pid) from None
    except OSError:
        return None
    return fields[0], fields[19]


class Watch:
    """Looks at the other ranks in one wait for them."""

    def __init__(self, world: World, what: str, begun_s: float | None = None) -> None:
        """`what`: names the exchange in messages; `begun_s`: when the wait began (monotonic), default: now."""
        self._world, self._what = world, what
        self._begun_s = time.monotonic() if begun_s is None else begun_s
        self._lost: Counter[int] = Counter()
        """Number of consecutive looks, by rank, that have found its process not running."""

    def look(self) -> None:
        """Look at the processes of other ranks on this machine, and say once that the wait is long.

        Raises CommunicationError: the process of a rank has not run for as long as a wait may take until it is said.
        """
        world = self._world
        if world.notice_s is None:
            return
        for process in world.neighbours:
            fate = process.fate()
            self._lost[process.rank] = self._lost[process.rank] + 1 if fate else 0
            if self._lost[process.rank] >= LOOKS:
                world.break_off(process.rank)
                raise CommunicationError(
                    f"rank {world.rank}: {self._what} did not complete: rank {process.rank} (process {process.pid}) "
                    f"{fate}, and for the last {world.notice_s:.0f} s did not run; end all ranks and start them again"
                )
        waited_s = time.monotonic() - self._begun_s
        if waited_s >= world.notice_s and not world.noticed:
            world.noticed = True
            warnings.warn(
                f"rank {world.rank}: {self._what} has waited {waited_s:.0f} s for {world.others}, busy outside of a "
                f"step (validation, saving) or hanging; it is waited for up to {world.timeout_s:.0f} s, the timeout of "
                f"the process group. For another deadline pass timeout_s. This is said once",
                LongWaitWarning,
                stacklevel=2,
            )


def slice_of(world: World, limit_s: float) -> float:
    """Return the seconds between two looks at other ranks during a wait of up to `limit_s`."""
    return limit_s if world.notice_s is None else min(world.notice_s / LOOKS, limit_s)


def wait_watched(over: Callable[[float], bool], world: World, what: str) -> None:
    """Return when `over(seconds)`, which waits no longer than that, says that it is.

    Args:
        over: what is waited for.
        world: the ranks, and how long they wait for each other; on top of that the backend may be late to say so.
        what: names the exchange in messages.

    Raises:
        CommunicationError: see `Watch.look`.
        DistNetworkError: it was not over within the deadline.
    """
    limit_s = world.timeout_s + GRACE_S
    slice_s = slice_of(world, limit_s)
    if over(slice_s):
        return
    begun_s = time.monotonic() - slice_s
    watch = Watch(world, what, begun_s)
    while time.monotonic() < begun_s + limit_s:
        watch.look()
        if over(slice_s):
            return
    raise dist.DistNetworkError(f"not done within {limit_s:g} s")


def work_is_over(work: dist.Work, seconds: float) -> bool:
    """Wait for what a backend carries on a thread of its own. Raises what the backend raised."""
    try:
        wait_for(work, timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
    else:
        return True
    wait_for(work)  # raises what has failed, if it was not only that the time was over
    return True
