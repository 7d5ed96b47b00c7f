"""The ranks of a command: local processes that it starts, or the world of a launcher that started it."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from planner.jobs.launch import GRACE_S, START_TIMEOUT_S, LocalWorld, end, run_ranks, threads_per_rank
from planner.jobs.rank_options import RankOptions, under_torchrun
from planner.testbed.hosts import MAX_RANKS
from runtime.comm.world import World
from runtime.errors import EnvironmentFailure, InputError, PlanMismatch, PlannerError

T = TypeVar("T")

_NO_WIRE = ("undefined", "fake")
"""Names in torch's list of backends that send nothing."""


def on_ranks(options: RankOptions, function: Callable[..., T], *arguments: Any) -> list[T]:
    """Call a function on every rank and return the results in order of rank.

    Under torchrun this process is one rank, which joins; otherwise local processes are started (default 2).

    Raises:
        InputError: an option does not fit this machine or the launcher's world.
        EnvironmentFailure: a rank died or stalled, or not all came within the deadline.
    """
    device, backend = choose_device(options.device), options.backend
    wired = [name for name in dist.Backend.backend_list if name not in _NO_WIRE]
    here = [name for name in wired if dist.is_backend_available(name)]
    if backend is not None and backend not in here:
        lacks = ", which this build of torch lacks" if backend in wired else ""
        raise InputError(
            f"--backend: found {backend!r}{lacks}, expected one of: {', '.join(sorted(here))}; correct it, or leave it "
            f"out"
        )
    if options.emulation is not None:
        backend = "gloo"
    here_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if under_torchrun() else options.local_ranks
    world = LocalWorld(
        ranks=options.local_ranks, device=device, backend=choose_backend(backend, device, here_ranks),
        timeout_s=options.timeout_s, emulation=options.emulation,
    )  # fmt: skip
    if under_torchrun():
        _join(world, given_ranks=options.ranks)
        return _on_this_rank(world, function, arguments)
    return run_ranks(world, function, *arguments)


def choose_backend(backend: str | None, device: str, local_ranks: int) -> str:
    """Return the backend for ranks on this machine: by default nccl if each has a GPU of its own, else gloo.

    Raises:
        InputError: ranks would share a GPU under nccl, which refuses it after a while, in its own words.
    """
    devices = torch.cuda.device_count() if device == "cuda" else 0
    if backend == "nccl" and devices < local_ranks:
        raise InputError(
            f"--backend nccl: found {local_ranks} ranks on {devices} GPUs of this machine, expected one for each rank; "
            f"use --ranks {max(1, devices)} --device cuda, or --backend gloo, over which ranks may share a GPU"
        )
    alone = devices >= local_ranks and dist.is_nccl_available()
    return backend or ("nccl" if alone else "gloo")


def on_ranks_of_script(options: RankOptions, function: Callable[..., T], *arguments: Any) -> list[T]:
    """Call a function on local ranks in the state in which torchrun starts them: it joins by itself.

    Raises:
        InputError: a launcher has started this process; or an option is for the script to decide.
        EnvironmentFailure: a rank died or stalled.
    """
    if under_torchrun():
        raise InputError(
            "torchrun has started the ranks already; start the script itself with torchrun, and print what its "
            "planner.compare gives"
        )
    for name in ("device", "backend", "emulate"):
        if getattr(options, name) != getattr(RankOptions, name):
            raise InputError(
                f"--{name}: found {getattr(options, name)}, which a script decides by itself; leave it out"
            )
    return run_ranks(
        LocalWorld(ranks=options.local_ranks, timeout_s=options.timeout_s, joins=False), function, *arguments
    )


def planned_ranks(ranks: int, plan: str) -> int | None:
    """Return the number of ranks to start for a plan, None under a launcher, which has started them.

    Raises:
        PlanMismatch: they are more than one machine can hold.
    """
    if under_torchrun():
        return None
    if ranks > MAX_RANKS:
        raise PlanMismatch(
            f"{plan}: $.world.ranks: found a plan for {ranks} ranks, expected at most {MAX_RANKS} on one "
            f"machine; start the job with torchrun, or make a plan for fewer ranks"
        )
    return ranks


def is_first_rank() -> bool:
    """Return whether this process prints and writes files for the command."""
    return os.environ.get("RANK", "0") == "0" or not under_torchrun()


def choose_device(device: str) -> str:
    """Return, for `auto`, `cuda` if it works, else `cpu`. Raises InputError for a device that is not here."""
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device: found {device!r}, expected auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no CUDA device here; use --device cpu, or see `planner doctor`")
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send what a job prints to standard error: it is not the command's result."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _join(world: LocalWorld, *, given_ranks: int | None) -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    if given_ranks is not None and given_ranks != world_size:
        raise InputError(f"--ranks {given_ranks}: torchrun started {world_size} ranks; leave --ranks out")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    if world.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_sigterm)
    timeout = timedelta(seconds=world.start_timeout_s)
    try:
        store, rank, ranks = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        # After a restart torchrun's store still holds the addresses of the ranks that are gone.
        store = PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(world.backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise EnvironmentFailure(f"the ranks of torchrun did not come together: {error}") from error


def _on_this_rank(options: LocalWorld, function: Callable[..., T], arguments: tuple[Any, ...]) -> list[T]:
    """Return the function's results on all ranks of the launcher's world."""
    try:
        with _stdout_to_stderr():
            result = function(*arguments)
            world = World.join(None, options.timeout_s or START_TIMEOUT_S)
            results: list[T] = world.gather(result, "collecting the results")
    except Exception as error:
        ours = error if isinstance(error, PlannerError) else None
        # The group stays as it is, and the process will not be taken down in order: see `end`.
        atexit.register(end, 3 if ours is None else ours.exit_code)
        if ours is not None:
            raise
        rank = dist.get_rank() if dist.is_initialized() else os.environ["RANK"]
        raise EnvironmentFailure(f"rank {rank} raised {type(error).__name__}: {error}") from error
    dist.destroy_process_group()
    return results


def _on_sigterm(_signal: int, _frame: object) -> None:
    """End this rank with exit code 3, a moment later.

    A launcher ends all ranks when one has failed. This one may have noticed, too, and reports in which collective.
    """

    def leave() -> None:
        rank = os.environ.get("RANK", "0")
        print(f"planner: rank {rank}: ended by the launcher (SIGTERM): it was ended, or a rank failed", file=sys.stderr)
        end(3)

    timer = threading.Timer(GRACE_S, leave)
    timer.daemon = True
    timer.start()
