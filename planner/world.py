"""Where the ranks of a command run: local processes that it starts, or the world of a launcher that started it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from planner.launch import START_TIMEOUT_S, LocalWorld, run_ranks, threads_per_rank, under_torchrun
from runtime.errors import EnvironmentFailure, InputError, PlanMismatch

T = TypeVar("T")

MAX_LOCAL_RANKS = 256
"""More processes than any one machine trains with."""


def on_ranks(
    ranks: int | None, device: str, backend: str | None, function: Callable[..., T], *arguments: Any
) -> list[T]:
    """Calls a function on every rank and returns the results in order of rank.

    Under torchrun this process is one rank: it joins, and gets every rank's result. Otherwise `ranks` local processes
    are started (default 2).

    Raises:
        InputError: an option does not fit this machine or the launcher's world.
        EnvironmentFailure: a rank died, or not all came within the deadline.
    """
    device = choose_device(device)
    if backend is not None and backend not in dist.Backend.backend_list:
        raise InputError(
            f"--backend: found {backend!r}, expected one of: {', '.join(sorted(dist.Backend.backend_list))}"
        )
    backend = backend or ("nccl" if device == "cuda" and torch.cuda.device_count() > 1 else "gloo")
    if under_torchrun():
        return _join(ranks, device, backend, function, arguments)
    count = 2 if ranks is None else ranks
    if not 1 <= count <= MAX_LOCAL_RANKS:
        raise InputError(
            f"--ranks: found {count}, expected at least 1 and at most {MAX_LOCAL_RANKS} on one machine; correct it, or "
            f"start more with torchrun"
        )
    return run_ranks(LocalWorld(ranks=count, device=device, backend=backend), function, *arguments)


def planned_ranks(ranks: int, plan: str) -> int | None:
    """How many ranks to start for a plan; None under a launcher, which has started them.

    Raises:
        PlanMismatch: more than one machine can hold.
    """
    if under_torchrun():
        return None
    if ranks > MAX_LOCAL_RANKS:
        raise PlanMismatch(
            f"{plan}: $.world.ranks: found a plan for {ranks} ranks, expected at most {MAX_LOCAL_RANKS} on one "
            f"machine; start the job with torchrun, or make a plan for fewer ranks"
        )
    return ranks


def is_first_rank() -> bool:
    """Whether this process speaks for the command: prints and writes files."""
    return os.environ.get("RANK", "0") == "0" or not under_torchrun()


def choose_device(device: str) -> str:
    """`auto` → `cuda` where it works, else `cpu`. Raises InputError for a device that is not here."""
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device: found {device!r}, expected auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no CUDA device here; use --device cpu, or see `planner doctor`")
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """What a job prints is not the command's result."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _join(
    ranks: int | None, device: str, backend: str, function: Callable[..., T], arguments: tuple[Any, ...]
) -> list[T]:
    world_size = int(os.environ["WORLD_SIZE"])
    if ranks is not None and ranks != world_size:
        raise InputError(f"--ranks {ranks}: torchrun started {world_size} ranks; leave --ranks out")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=START_TIMEOUT_S))
    except (RuntimeError, ValueError) as error:
        raise EnvironmentFailure(f"the ranks of torchrun did not come together: {error}") from error
    try:
        results: list[Any] = [None] * world_size
        with _stdout_to_stderr():
            dist.all_gather_object(results, function(*arguments))
        return results
    finally:
        dist.destroy_process_group()
