"""The ranks that share a cache: they agree on what it is, and those of one node on its memory and disk."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.comm.world import World
from runtime.datacache.database import Database, existing, least_bound_bytes
from runtime.datacache.disk import DiskStore
from runtime.datacache.memory import NodeMemory, overhead_bytes
from runtime.datacache.partition import Partition
from runtime.datacache.samples import ALIGNMENT
from runtime.datacache.source import PROBED, Source, probe
from runtime.errors import EnvironmentFailure, InputError, PlannerError
from runtime.plan.files import checked_path

FREE_SHARE = 0.1
"""How much of the disk's free space a cache without a bound leaves."""

REMOTE = frozenset(("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "glusterfs", "afs", "fuse.sshfs",
                    "fuse.glusterfs", "beegfs", "gpfs", "wekafs", "fuse.s3fs", "fuse.gcsfuse"))  # fmt: skip


@dataclass(frozen=True)
class CacheRequest:
    """What a rank was asked for."""

    local_dir: Path | None
    memory_bytes: int
    disk_bytes: int | None
    dataset: str
    """See `source.identity`, or the name that was given."""
    node: str
    samples: int
    seed: int
    fetch: bool
    probe: bool
    key: str
    """Rank 0's tells this cache from others."""


Shared = tuple[NodeMemory, DiskStore | None, int]
"""What the ranks of a node have in common: memory, disk, and the size of the largest raw sample that was looked at."""


def node_name(node: str | None) -> str:
    """Name this machine: as given, or by torchrun's node number, the host and its view of processes."""
    if node is not None:
        return str(node)
    try:
        view = os.readlink("/proc/self/ns/pid")  # containers on one host may not see each other's memory
    except OSError:
        view = ""
    return f"{os.environ.get('GROUP_RANK', '')} {socket.gethostname()} {view}"


def check_bytes(name: str, value: object, *, may_be_none: bool = False) -> None:
    """Raise InputError where a number of bytes is none."""
    if value is None and may_be_none:
        return
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise InputError(f"{name}: found {value!r}, expected a number of bytes, such as 8 * 2**30")


def check_folder(local_dir: object) -> Path:
    """Return the cache's directory. Raises InputError: no path; a file; on a network, where SQLite's locks fail."""
    folder = Path(checked_path(local_dir)).absolute()
    if folder.exists() and not folder.is_dir():
        raise InputError(f"local_dir: {folder} is a file, expected a directory; name another one")
    kind = file_system(folder)
    if kind in REMOTE:
        raise InputError(
            f"local_dir: {folder} is on a network file system ({kind}), expected a disk of this node; name another one"
        )
    return folder


def file_system(folder: Path) -> str:
    """The kind of file system that a path is on, by the kernel's table of mounts; empty where that is not known."""
    best, kind = "", ""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                _, point, found, *_ = line.split(" ")
                if len(point) >= len(best) and folder.is_relative_to(point):
                    best, kind = point, found
    except (OSError, ValueError):
        return ""
    return kind


def agree(world: World, mine: CacheRequest | PlannerError) -> list[CacheRequest]:
    """Return all ranks' requests. Raises InputError, on all alike, where one has a problem or they may not differ."""
    everyone: list[CacheRequest | PlannerError] = world.gather(mine, "agreeing on a data cache")
    raise_all(everyone, mine)
    requests = [one for one in everyone if isinstance(one, CacheRequest)]
    for name, what in (("samples", "lengths of the dataset"), ("seed", "seeds"), ("fetch", "values of fetch")):
        values = [getattr(one, name) for one in requests]
        if len(set(values)) > 1:
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values[:8]))
            raise InputError(f"ranks have different {what} ({listed}), expected equal ones; give every rank the same")
    for node in {one.node for one in requests}:
        here = {(one.memory_bytes, one.disk_bytes, one.local_dir, one.dataset) for one in requests if one.node == node}
        if len(here) > 1:
            raise InputError(
                "ranks of one node gave different datasets, memory_bytes, disk_bytes or local_dir, expected equal "
                "ones, which they share; give every rank the same"
            )
    return requests


def raise_all(everyone: Sequence[object], mine: object) -> None:
    """Raise where any rank has a problem: on it, its own; on others InputError or EnvironmentFailure, as it is."""
    if isinstance(mine, BaseException):
        raise mine
    for rank, one in enumerate(everyone):
        if isinstance(one, BaseException):
            kind = InputError if isinstance(one, InputError) else EnvironmentFailure
            raise kind(f"rank {rank}: {one}")


def share(world: World, request: CacheRequest, source: Source, partition: Partition, node: int) -> Shared:
    """Return the memory and disk of this node. Its first rank makes and checks them, the others open them. Raises
    InputError where a bound is smaller than one sample, EnvironmentFailure where there is no memory, or it cannot be
    seen.
    """
    first = partition.ranks_of(node)[0]
    made: Shared | None = None
    told: Any = None
    raised: BaseException | None = None
    if world.rank == first:
        try:
            made = memory, disk, raw_bytes = _make(request, source, partition, node)
            told = memory.address, disk and disk.bound_bytes, raw_bytes
        except PlannerError as error:
            told = raised = error
        except Exception as error:  # the dataset's own, which is raised as it is here: other ranks wait for a word
            told, raised = EnvironmentFailure(f"the dataset raised {type(error).__name__}: {error}"), error
    everyone = world.gather(told, "sharing memory")
    raise_all(everyone, raised)
    problem: PlannerError | None = None
    if made is None:
        try:
            address, bound_bytes, raw_bytes = everyone[first]
            memory = NodeMemory.open(address)
            made = memory, _disk(request, bound_bytes, memory, partition, node), raw_bytes
        except PlannerError as error:
            problem = error
    raise_all(world.gather(problem, "opening the memory of the nodes"), problem)
    assert made is not None
    return made


def _make(request: CacheRequest, source: Source, partition: Partition, node: int) -> Shared:
    part = partition.part(node)
    memory = NodeMemory.make(partition.size(node) if request.memory_bytes else 0, request.memory_bytes)
    bound_bytes = request.disk_bytes
    if request.local_dir is not None and bound_bytes is None:  # what the files take now, and most of what is free
        here = Database(request.local_dir, 0, "").size_bytes()
        bound_bytes = here + int(shutil.disk_usage(existing(request.local_dir)).free * (1.0 - FREE_SHARE))
    disk = _disk(request, bound_bytes, memory, partition, node)
    if not request.probe or not (request.memory_bytes or disk or request.fetch):
        return memory, disk, 0
    chosen = {0, source.samples - 1} if not len(part) else {int(part[0]), int(part[-1])}
    chosen |= {int(index) for index in np.random.default_rng().choice(part, min(len(part), PROBED - len(chosen)))}
    found, raw_bytes, flat_bytes = probe(source, sorted(chosen), decoded=request.memory_bytes > 0 or request.fetch)
    least = overhead_bytes(partition.size(node)) + -(-flat_bytes // ALIGNMENT) * ALIGNMENT
    if 0 < request.memory_bytes < least:
        raise InputError(
            f"memory_bytes: found {request.memory_bytes}, expected at least {least}: one decoded sample has "
            f"{flat_bytes} bytes, and the table {least - flat_bytes}; give more, or 0 to keep none in memory"
        )
    least = least_bound_bytes(raw_bytes)
    if disk is not None and disk.bound_bytes < least:
        raise InputError(
            f"disk_bytes: found {disk.bound_bytes}{'' if request.disk_bytes is not None else ' free'}, expected at "
            f"least {least}: one raw sample has {raw_bytes} bytes, and the database needs some; give more, or no "
            f"local_dir to keep none on the disk"
        )
    if disk is not None:
        disk.compare(found)
    return memory, disk, raw_bytes


def _disk(
    request: CacheRequest, bound_bytes: int | None, memory: NodeMemory, partition: Partition, node: int
) -> DiskStore | None:
    if request.local_dir is None or bound_bytes is None:
        return None
    return DiskStore(request.local_dir, bound_bytes, request.dataset, memory, partition.owned(node))
