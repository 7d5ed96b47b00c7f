"""Runs a function on N local ranks: starts the processes, forms the process group, brings results and errors back."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from runtime.errors import CommunicationError, EnvironmentFailure, PlannerError

T = TypeVar("T")

START_TIMEOUT_S = 120.0
"""Deadline for all local ranks to import torch and find each other."""


@dataclass(frozen=True, kw_only=True)
class LocalWorld:
    """How local ranks are started."""

    ranks: int
    backend: str = "gloo"
    device: str = "cpu"
    timeout_s: float = START_TIMEOUT_S


@dataclass(frozen=True)
class _Failure:
    """What a rank that raised leaves behind."""

    rank: int
    time: float
    error: PlannerError | None
    text: str
    trace: str


def under_torchrun() -> bool:
    """Whether a launcher has made this process one rank of a world."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def run_ranks(world: LocalWorld, function: Callable[..., T], *arguments: Any) -> list[T]:
    """Calls `function(*arguments)` on every local rank, inside an initialized process group.

    Args:
        world: how many ranks, which backend and device.
        function: importable by name; its result must be picklable.

    Returns:
        The results in order of rank.

    Raises:
        PlannerError: the first error that a rank raised on purpose, as it was raised.
        EnvironmentFailure: a rank died or raised something else; names the rank.
    """
    with tempfile.TemporaryDirectory(prefix="planner-ranks-") as folder:
        store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=world.timeout_s)
        )
        context: Any = start_processes(
            _rank_main,
            args=(world, store.port, folder, function, arguments),
            nprocs=world.ranks,
            join=False,
            start_method="spawn",
        )
        try:
            while not context.join(timeout=1.0, grace_period=2.0):
                pass
        except (ProcessExitedException, ProcessRaisedException) as error:
            if not all((Path(folder) / f"result-{rank}").exists() for rank in range(world.ranks)):
                raise _cause(Path(folder), error) from None
            # Every rank had done its work; one died while it was taking its process group down.
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(world.ranks)]


def _cause(folder: Path, exited: ProcessExitedException | ProcessRaisedException) -> PlannerError:
    """The error to show: the earliest that is not a mere consequence of another rank's."""
    failures: list[_Failure] = [pickle.loads(path.read_bytes()) for path in folder.glob("error-*")]
    failures.sort(key=lambda failure: (isinstance(failure.error, CommunicationError), failure.time))
    signal_name = getattr(exited, "signal_name", None)
    if signal_name is not None:
        return EnvironmentFailure(f"rank {exited.error_index} was killed by {signal_name}")
    if not failures:
        return EnvironmentFailure(f"rank {exited.error_index} ended without a word: {exited}")
    first = failures[0]
    if first.error is not None:
        first.error.add_note(first.trace)
        return first.error
    failure = EnvironmentFailure(f"rank {first.rank} raised {first.text}")
    failure.add_note(first.trace)  # shown with a traceback, which the command line prints on request
    return failure


def _rank_main(
    rank: int, world: LocalWorld, port: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends us
    os.dup2(2, 1)  # what a job prints is not the command's result
    try:
        _join(rank, world, port)
        result = function(*arguments)
        _leave(Path(folder) / f"result-{rank}", result)
        if dist.is_initialized():
            dist.destroy_process_group()
        _end(0)
    except BaseException as error:
        ours = error if isinstance(error, PlannerError) else None
        text = f"{type(error).__name__}: {error}"
        _leave(Path(folder) / f"error-{rank}", _Failure(rank, time.time(), ours, text, traceback.format_exc()))
        _end(1)


def _end(code: int) -> NoReturn:
    """Leaves at once: threads in a broken collective must not hold the process up, and torch's sometimes abort it when
    the interpreter takes them down in order. What was registered to run at exit does run after a success.
    """
    if code == 0:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave(path: Path, value: Any) -> None:
    """Writes a file whole or not at all."""
    partial = path.with_suffix(".part")
    partial.write_bytes(pickle.dumps(value))
    partial.rename(path.with_suffix(""))


def _join(rank: int, world: LocalWorld, port: int) -> None:
    here = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
    here |= {"WORLD_SIZE": world.ranks, "LOCAL_WORLD_SIZE": world.ranks}
    os.environ.update({name: str(value) for name, value in here.items()})
    if world.backend == "gloo" and "GLOO_SOCKET_IFNAME" not in os.environ:
        loopback = _loopback()
        if loopback is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = loopback
    torch.set_num_threads(threads_per_rank(world.ranks))
    if world.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    timeout = timedelta(seconds=world.timeout_s)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group(world.backend, store=store, rank=rank, world_size=world.ranks, timeout=timeout)


def threads_per_rank(local_ranks: int) -> int:
    """The cores of this machine, shared evenly."""
    return max(
        1, (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) // local_ranks
    )


def _loopback() -> str | None:
    """The loopback interface: without it gloo looks the host's name up, which need not lead to this machine."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
