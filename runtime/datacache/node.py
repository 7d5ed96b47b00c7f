"""The ranks that share a cache: they agree on what it is, and those of one node on its memory and disk."""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from runtime.comm.world import World
from runtime.datacache.disk import DiskStore, existing, least_bound_bytes, remove_old_files, used_bytes
from runtime.datacache.memory import NodeMemory, overhead_bytes
from runtime.datacache.partition import Partition
from runtime.datacache.samples import ALIGNMENT
from runtime.datacache.source import PROBED, Source, probe
from runtime.errors import EnvironmentFailure, InputError, PlannerError
from runtime.plan.files import checked_path

FREE_SHARE = 0.1
"""Share of the disk's free space that a cache without a bound leaves."""

REMOTE = frozenset(("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "glusterfs", "afs", "fuse.sshfs",
                    "fuse.glusterfs", "beegfs", "gpfs", "wekafs", "fuse.s3fs", "fuse.gcsfuse"))  # fmt: skip


@dataclass(frozen=True)
class CacheRequest:
    """One rank's options of a cache."""

    local_dir: Path | None
    memory_bytes: int
    disk_bytes: int | None
    dataset: str
    """Name of the dataset: as given, or its digest (see `source.identity`)."""
    node: str
    samples: int
    seed: int
    fetch: bool
    probe: bool
    key: str
    """Random name; rank 0's tells this cache from others."""


T = TypeVar("T")


@dataclass
class NodeCaches:
    """The caches that the ranks of a node have in common."""

    memory: NodeMemory
    disk: DiskStore | None
    raw_bytes: int = 0
    """Size of the largest raw sample that was read at the start, in bytes; 0 without `probe`."""


def node_name(node: str | None) -> str:
    """Name this machine: as given, or by torchrun's node number, the host and its view of processes."""
    if node is not None:
        return str(node)
    try:
        view = os.readlink("/proc/self/ns/pid")  # containers on one host may not see each other's memory
    except OSError:
        view = ""
    return f"{os.environ.get('GROUP_RANK', '')} {socket.gethostname()} {view}"


def check_bytes(name: str, value: object) -> None:
    """Raise InputError unless an option is a number of bytes."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise InputError(f"{name}: found {value!r}, expected a number of bytes, such as 8 * 2**30")


def check_folder(local_dir: object) -> Path:
    """Return the cache's directory. Raises InputError: no path; a file; on a network, where locks fail."""
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
    """Return the kind of file system that a path is on, by the kernel's table of mounts; empty if that is unknown."""
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
    """Return all ranks' requests. Raises InputError, on all alike, if one has a problem or they may not differ."""
    requests: list[CacheRequest] = gather_or_raise(world, mine, "agreeing on a data cache")
    for name, what in (("samples", "lengths of the dataset"), ("seed", "seeds"), ("fetch", "values of fetch")):
        values = [getattr(one, name) for one in requests]
        if len(set(values)) > 1:
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values[:8]))
            raise InputError(f"ranks have different {what} ({listed}), expected equal ones; give every rank the same")
    if len({(one.node, one.memory_bytes, one.disk_bytes, one.local_dir, one.dataset) for one in requests}) > len(
        {one.node for one in requests}
    ):
        raise InputError(
            "ranks of one node gave different datasets, memory_bytes, disk_bytes or local_dir, expected equal "
            "ones, which they share; give every rank the same"
        )
    return requests


def gather_or_raise(world: World, mine: T | Exception, what: str) -> list[T]:
    """Gather every rank's value; one that is an error is raised, on other ranks as InputError or EnvironmentFailure."""
    sent = mine
    if isinstance(mine, Exception) and not isinstance(mine, PlannerError):  # a dataset's own
        sent = EnvironmentFailure(f"the dataset raised {type(mine).__name__}: {mine}")
    everyone = world.gather(sent, what)
    if isinstance(mine, Exception):
        raise mine
    for rank, one in enumerate(everyone):
        if isinstance(one, Exception):
            raise (InputError if isinstance(one, InputError) else EnvironmentFailure)(f"rank {rank}: {one}")
    return everyone


def share(world: World, request: CacheRequest, source: Source, partition: Partition) -> NodeCaches:
    """Return the memory and disk of this node, which its first rank makes and checks, and the others open.

    Raises:
        InputError: a bound is smaller than one sample.
        EnvironmentFailure: there is no memory, or it cannot be seen.
    """
    node = partition.node_of_rank[world.rank]
    first = partition.ranks_of(node)[0]
    made: NodeCaches | None = None
    told: Any = None
    try:
        if world.rank == first:
            made = _make(request, source, partition, node)
            told = made.memory.address, made.disk and made.disk.bound_bytes, made.raw_bytes
    except Exception as error:  # other ranks wait for an answer in any case
        told = error
    everyone = gather_or_raise(world, told, "sharing memory")
    problem = None
    try:
        if made is None:
            address, bound_bytes, raw_bytes = everyone[first]
            memory = NodeMemory.open(address)
            made = NodeCaches(memory, _disk(request, bound_bytes, memory, partition.owned(node)), raw_bytes)
    except PlannerError as error:
        problem = error
    gather_or_raise(world, problem, "opening the memory of the nodes")
    assert made is not None
    return made


def _make(request: CacheRequest, source: Source, partition: Partition, node: int) -> NodeCaches:
    part = partition.part(node)
    memory = NodeMemory.make(len(part) if request.memory_bytes else 0, request.memory_bytes)
    bound_bytes = request.disk_bytes
    if request.local_dir is not None:
        remove_old_files(request.local_dir, memory)
    if request.local_dir is not None and bound_bytes is None:  # what the files take now, and most of what is free
        here = used_bytes(request.local_dir)
        bound_bytes = here + int(shutil.disk_usage(existing(request.local_dir)).free * (1.0 - FREE_SHARE))
    disk = _disk(request, bound_bytes, memory, partition.owned(node))
    if not request.probe or not (request.memory_bytes or disk or request.fetch):
        return NodeCaches(memory, disk)
    chosen = {0, source.samples - 1} if not len(part) else {int(part[0]), int(part[-1])}
    chosen |= {int(index) for index in np.random.default_rng().choice(part, min(len(part), PROBED - len(chosen)))}
    found, raw_bytes, flat_bytes = probe(source, sorted(chosen), decoded=request.memory_bytes > 0 or request.fetch)
    least = overhead_bytes(len(part)) + -(-flat_bytes // ALIGNMENT) * ALIGNMENT
    if 0 < request.memory_bytes < least:
        raise InputError(
            f"memory_bytes: found {request.memory_bytes}, expected at least {least}: one decoded sample has "
            f"{flat_bytes} bytes, and the table {least - flat_bytes}; give more, or 0 to keep none in memory"
        )
    if disk is not None:
        least = least_bound_bytes(raw_bytes)
        if disk.bound_bytes < least:
            raise InputError(
                f"disk_bytes: found {disk.bound_bytes}{'' if request.disk_bytes is not None else ' free'}, expected at "
                f"least {least}: one raw sample has {raw_bytes} bytes, in whole blocks; give more, or no "
                f"local_dir to keep none on the disk"
            )
        disk.compare(found)
    return NodeCaches(memory, disk, raw_bytes)


def _disk(
    request: CacheRequest, bound_bytes: int | None, memory: NodeMemory, owned: np.ndarray | None
) -> DiskStore | None:
    if request.local_dir is None or bound_bytes is None:
        return None
    return DiskStore(request.local_dir, bound_bytes, request.dataset, memory, owned)
