"""Runs a function on N local ranks: starts the processes, forms the process group, returns results and errors.

How ranks end. A rank may compute for any time, so this parent never limits that. It ends a rank in three cases: another
rank has failed (the others get `GRACE_S` to report what they saw); the rank has been stopped (SIGSTOP) for the whole
deadline; another rank is done, and this one has not followed within the deadline. A rank that hangs without being
stopped is found by the ranks that wait for it, since every wait of theirs has a deadline. When this parent ends in any
way, its ranks are killed. Results are in files without a name: nothing stays behind.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import DupFd
from typing import Any, BinaryIO, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from planner.testbed.hosts import Emulation, Place, places_for
from runtime.comm.waits import is_stopped
from runtime.comm.world import MIN_TIMEOUT_S
from runtime.errors import CommunicationError, EnvironmentFailure, PlannerError
from runtime.local_async.processes import end_with_parent, on_signal

T = TypeVar("T")

START_TIMEOUT_S = 120.0
"""Least deadline for all ranks to import torch and find each other; also for the last rank to end after the first."""
GRACE_S = 10.0
"""Seconds for which the others may continue once a rank has failed: they notice, and report in which collective."""
POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class LocalWorld:
    """The options of a launch of local ranks."""

    ranks: int
    backend: str = "gloo"
    device: str = "cpu"
    timeout_s: float | None = None
    """Deadline of the waits that this module does; default: 30 s for a stopped rank, 120 s for starting and ending."""
    emulation: Emulation | None = None
    """The emulated cluster to run on, of as many ranks."""
    joins: bool = True
    """Whether ranks are put into a process group; otherwise the function does that, as under torchrun."""

    @property
    def start_timeout_s(self) -> float:
        """Deadline for all ranks to find each other: a short deadline is not meant for importing torch."""
        return max(START_TIMEOUT_S, self.timeout_s or 0.0)


@dataclass(frozen=True)
class _Result:
    """The result of a rank that has done its work."""

    value: Any


@dataclass(frozen=True)
class _Failure:
    """The error of a rank that raised."""

    rank: int
    time: float
    error: PlannerError | None
    text: str
    trace: str


class _ResultFile:
    """A file without a name, which a rank writes and its parent reads when the rank has ended."""

    def __init__(self, file: BinaryIO | None = None) -> None:
        self._file = file or cast(BinaryIO, tempfile.TemporaryFile(prefix="planner-"))  # noqa: SIM115

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (DupFd(self._file.fileno()),)

    def write(self, result: _Result | _Failure) -> None:
        self._file.write(pickle.dumps(result))
        self._file.flush()

    def read(self) -> _Result | _Failure | None:
        """Return the result, once; None where the rank wrote nothing, or was killed while it wrote."""
        with self._file as file:
            file.seek(0)
            try:
                result: _Result | _Failure = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                return None
            return result


def _reopened(descriptor: Any) -> _ResultFile:
    return _ResultFile(os.fdopen(descriptor.detach(), "wb"))


@dataclass(eq=False)
class _Rank:
    """The parent's view of one rank."""

    number: int
    process: SpawnProcess
    file: _ResultFile
    result: _Result | _Failure | None = None
    """The rank's result or error; known when all ranks have ended."""
    stopped_since: float | None = None
    ended_because: str = ""
    """Reason why this parent ended it; empty if it did not."""

    @property
    def fate(self) -> str:
        """Describe the end of a rank without a result."""
        code = self.process.exitcode
        if self.ended_because:
            return f"rank {self.number} {self.ended_because}"
        if code is not None and code < 0:
            return f"rank {self.number} was killed by {signal.Signals(-code).name}"
        return f"rank {self.number} ended without a result (exit code {code})"

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the process; False where that cannot be known (not on Linux)."""
        return is_stopped(self.process.pid)

    def end(self, why: str = "") -> None:
        """Kill the rank and what it started."""
        if self.process.exitcode is None:
            self.ended_because = "was stopped (SIGSTOP) and did not continue" if self.is_stopped() else why
        assert self.process.pid is not None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # before it has made its own process group, too
        self.process.join()


def run_ranks(world: LocalWorld, function: Callable[..., T], *arguments: Any) -> list[T]:
    """Call `function(*arguments)` on every local rank, inside an initialized process group.

    Args:
        world: the launch.
        function: importable by name; its results can be pickled.
        *arguments: of the function.

    Returns:
        The results in order of rank.

    Raises:
        PlannerError: the first error that a rank raised on purpose, as it was raised.
        EnvironmentFailure: a rank died, stalled or raised something else; names the rank, and what the others saw. Or
            the emulated cluster did not come up.
    """
    ranks: list[_Rank] = []

    def leave(number: int, _frame: object) -> NoReturn:
        sys.exit(128 + number)  # the code of an uncaught signal, but in order: the ranks are ended on the way out

    with on_signal(signal.SIGTERM, leave), places_for(world.ranks, world.emulation) as place_of:
        timeout = timedelta(seconds=world.start_timeout_s)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        try:
            # Inherited: until ranks have a process group of their own, Ctrl-C is not for them.
            with on_signal(signal.SIGINT, signal.SIG_IGN):
                for number in range(world.ranks):
                    file = _ResultFile()
                    join = partial(_join, number, world, place_of(number), store.port)
                    given = (number, join, file, partial(function, *arguments))
                    process = multiprocessing.get_context("spawn").Process(target=_rank_main, args=given)
                    process.start()
                    ranks.append(_Rank(number, process, file))
            _watch(ranks, world)
        finally:
            for rank in ranks:
                rank.end()
            for rank in ranks:
                rank.result = rank.file.read()
    results = [rank.result.value for rank in ranks if isinstance(rank.result, _Result)]
    if len(results) < world.ranks:
        raise _cause(ranks)
    # Every rank has done its work; one may have died while it was taking its process group down.
    return results


def _watch(ranks: Sequence[_Rank], world: LocalWorld) -> None:
    """Block until every rank has ended; end those that need not be waited for (see the top of this file)."""
    stop_limit_s = (world.timeout_s or MIN_TIMEOUT_S) + GRACE_S  # ranks that wait for it notice first, and report
    rest_s = world.timeout_s or START_TIMEOUT_S
    over_at, why = float("inf"), ""
    while running := [rank for rank in ranks if rank.process.exitcode is None]:
        now = time.monotonic()
        codes = [rank.process.exitcode for rank in ranks if rank.process.exitcode is not None]
        if any(codes) and now + GRACE_S < over_at:
            over_at, why = now + GRACE_S, "was still running and was ended"
        elif codes and over_at == float("inf"):
            over_at, why = now + rest_s, f"did not end within {rest_s:g} s of the first rank's end"
        for rank in running:
            rank.stopped_since = (rank.stopped_since or now) if rank.is_stopped() else None
            lost = rank.stopped_since is not None and (any(codes) or now > rank.stopped_since + stop_limit_s)
            if lost or now > over_at:
                rank.end(why)
        wait_for_any([rank.process.sentinel for rank in running], timeout=POLL_S)


def _cause(ranks: Sequence[_Rank]) -> PlannerError:
    """Return the error to show: the first that is not a mere consequence, with what other ranks saw of it."""
    silent = [rank for rank in ranks if rank.result is None]
    in_time = sorted((r.result for r in ranks if isinstance(r.result, _Failure)), key=lambda failure: failure.time)
    seen = [failure for failure in in_time if isinstance(failure.error, CommunicationError)]
    raised = [failure for failure in in_time if not isinstance(failure.error, CommunicationError)]
    died = [rank for rank in silent if not rank.ended_because] or [rank for rank in silent if rank.stopped_since]
    if raised and not died:
        first = raised[0]
        error = first.error or EnvironmentFailure(f"rank {first.rank} raised {first.text}")
        error.add_note(first.trace)
        return error
    fates = [rank.fate for rank in died or silent] + [str(failure.error) for failure in seen[:1]]
    failure = EnvironmentFailure("; ".join(fates) or "the ranks failed without a result")
    for one in in_time:
        failure.add_note(one.trace)  # shown with a traceback, which the command line prints on request
    return failure


def _rank_main(rank: int, join: Callable[[], None], file: _ResultFile, function: Callable[[], Any]) -> None:
    os.setsid()  # Ctrl-C goes to the parent, which ends this rank and its processes
    end_with_parent()
    os.dup2(2, 1)  # what a job prints is not the command's result
    try:
        join()
        file.write(_Result(function()))
        if dist.is_initialized():
            dist.destroy_process_group()
        end(0)
    except BaseException as error:
        ours = error if isinstance(error, PlannerError) else None
        text = f"{type(error).__name__}: {error}"
        file.write(_Failure(rank, time.time(), ours, text, traceback.format_exc()))
        end(1)


def end(code: int) -> NoReturn:
    """End this process at once; exit handlers run only after a success.

    Threads in a broken collective would keep the process, and torch's sometimes abort it when the interpreter takes
    them down in order.
    """
    if code == 0:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _join(rank: int, world: LocalWorld, place: Place, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world.ranks))
    if world.backend == "gloo" and place.namespace is None and "GLOO_SOCKET_IFNAME" not in os.environ:
        # The loopback interface: without it gloo looks the host's name up, which need not lead to this machine.
        loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
        if loopback is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = loopback
    torch.set_num_threads(threads_per_rank(world.ranks))
    if not world.joins:
        # As torchrun's: the store is there already, and all ranks are its clients.
        os.environ.update(
            LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world.ranks), GROUP_RANK="0", MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
        )  # fmt: skip
        return
    if world.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    timeout = timedelta(seconds=world.start_timeout_s)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    place.enter()  # after it has been connected: ranks find each other over the machine's own loopback
    dist.init_process_group(world.backend, store=store, rank=rank, world_size=world.ranks, timeout=timeout)


def threads_per_rank(local_ranks: int) -> int:
    """Return an even share of the cores of this machine for each of `local_ranks` ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_ranks)
