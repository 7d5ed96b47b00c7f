"""Ranks forked from a process that has imported torch, where `run_ranks` spawns: an import takes seconds of CPU.

A rank gets what a spawned one inherits: environment, working folder, streams. It shares the seed of hashing with the
other ranks, and has modules that it did not import itself; `--cold` spawns them all, as outside of tests.
"""

from __future__ import annotations

import multiprocessing.forkserver
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

IMPORTED = ("torch._dynamo", "planner.jobs.launch", "planner.jobs.on_rank")
"""What most ranks import; torch imports the first for the first optimizer."""


class WarmContext:
    """Of multiprocessing, as far as `planner.jobs.launch` uses one."""

    @staticmethod
    def get_context(_method: str) -> type[WarmContext]:
        """Return the context whose processes are forked from the server, whichever is asked for."""
        return WarmContext

    @staticmethod
    def Process(target: Callable[..., None], args: tuple[Any, ...]) -> ForkServerProcess:
        """Return a process, not yet started, that calls `target(*args)` where and how this one would."""
        start_server()
        return ForkServerProcess(target=_call_as_spawned, args=(dict(os.environ), _Streams(), target, args))


class _Streams:
    """Standard output and error; unpickles in the process as their descriptors."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (DupFd(1), DupFd(2))


def _detached(*streams: Any) -> tuple[int, ...]:
    return tuple(stream.detach() for stream in streams)


def _call_as_spawned(
    environment: dict[str, str], streams: tuple[int, int], target: Callable[..., None], args: tuple[Any, ...]
) -> None:
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
    os.environ.clear()
    os.environ.update(environment)
    target(*args)


def start_server() -> None:
    """Start the process that ranks are forked from, unless it runs. It computes nothing: no threads of torch then."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # which this Python's server does not take over
    try:
        multiprocessing.forkserver.set_forkserver_preload([*IMPORTED, *checks()])
        multiprocessing.forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def checks() -> list[str]:
    """Return the names of the modules whose functions ranks call."""
    return sorted(path.stem for path in (Path(__file__).parent / "procs").glob("*_checks.py"))


def end_server() -> None:
    """Kill the server, and with it the ranks that it has forked; the next rank starts another."""
    pid = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    with suppress(ProcessLookupError, ChildProcessError):
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # left for multiprocessing, which looks whether it lives
