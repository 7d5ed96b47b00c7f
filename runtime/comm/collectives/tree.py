"""All-reduce over two binary trees: sums go up, results come down, in chunks that follow one another.

Each tree carries every second chunk. What is inside one tree is a leaf of the other, so that no rank sends twice as
much as another. Source: the two-tree algorithm (Sanders, Speck, Träff 2009), with the trees that NCCL 2.4 has. On a GPU
NCCL's own all-reduce chooses trees by itself; this one is for backends without any, and to compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist

from runtime.comm.collectives.phases import Phase, Vector, Works, bounds
from runtime.comm.topology import Topology
from runtime.comm.world import Grid

CHUNK_BYTES = 256 * 1024
"""A chunk is not smaller than this, as long as each tree has one."""
MAX_CHUNKS = 16


@dataclass(frozen=True)
class Transfer:
    """One chunk from one rank to another, where it is added to what is there, or takes its place."""

    source: int
    target: int
    chunk: int
    adds: bool


Rounds = tuple[tuple[Transfer, ...], ...]
"""Transfers of a round go at once; in each round a rank sends at most one chunk and receives at most one."""


def parent_of(rank: int, ranks: int) -> int | None:
    """Return a rank's parent in the first tree, in which odd ranks are leaves; None for its root, which is rank 0."""
    if rank == 0:
        return None
    lowest = rank & -rank
    above = (rank ^ lowest) | (lowest << 1)
    return above if above < ranks else rank ^ lowest


def parents(ranks: int, tree: int) -> list[int | None]:
    """Return each rank's parent in the first (0) tree or the second (1), in which even ranks are leaves where they can
    be.
    """
    if tree == 0:
        return [parent_of(rank, ranks) for rank in range(ranks)]
    # The mirror image has other leaves where ranks are even; where they are odd, all move on by one.
    there = [(ranks - 1 - rank) if ranks % 2 == 0 else (rank - 1) % ranks for rank in range(ranks)]
    back = {place: rank for rank, place in enumerate(there)}
    above = [parent_of(place, ranks) for place in there]
    return [None if place is None else back[place] for place in above]


@cache
def tree_rounds(ranks: int, chunks: int) -> Rounds:
    """Return the rounds of all transfers. Chunks go up before they come down, earlier ones before later ones."""
    waits: dict[Transfer, tuple[Transfer, ...]] = {}
    for chunk in range(chunks):
        waits |= _transfers(parents(ranks, chunk % 2), chunk)
    rounds: list[tuple[Transfer, ...]] = []
    done: set[Transfer] = set()
    left = list(waits)
    while left:
        taken: list[Transfer] = []
        sends: set[int] = set()
        receives: set[int] = set()
        for transfer in left:
            free = transfer.source not in sends and transfer.target not in receives
            if free and all(before in done for before in waits[transfer]):
                taken.append(transfer)
                sends.add(transfer.source)
                receives.add(transfer.target)
        done.update(taken)
        left = [transfer for transfer in left if transfer not in done]
        rounds.append(tuple(taken))
    return tuple(rounds)


def _transfers(above: Sequence[int | None], chunk: int) -> dict[Transfer, tuple[Transfer, ...]]:
    """Return the transfers of one chunk in one tree, each with those that it waits for."""
    up = {rank: Transfer(rank, parent, chunk, adds=True) for rank, parent in enumerate(above) if parent is not None}
    down = {rank: Transfer(parent, rank, chunk, adds=False) for rank, parent in enumerate(above) if parent is not None}

    def from_below(rank: int) -> tuple[Transfer, ...]:
        return tuple(up[child] for child, parent in enumerate(above) if parent == rank)

    waits = {up[rank]: from_below(rank) for rank in up}
    for rank, transfer in down.items():
        parent = above[rank]
        assert parent is not None
        waits[transfer] = (down[parent],) if parent in down else from_below(parent)
    return waits


def tree_phases(topology: Topology) -> tuple[Phase, ...]:
    """Return the one phase of the tree all-reduce, through all ranks."""
    ranks = topology.num_nodes * topology.ranks_per_node
    return (Phase("all_reduce", "inter" if topology.num_nodes > 1 else "intra", _run),) if ranks > 1 else ()


def _run(message: Vector, grid: Grid) -> Works:
    flat, rank, group = message.flat, grid.world.rank, grid.world.group
    chunks = max(2, min(MAX_CHUNKS, flat.numel() * flat.itemsize // CHUNK_BYTES))
    limits = [bounds(flat.numel(), chunks, chunk) for chunk in range(chunks)]
    arrived = torch.empty(max(stop - start for start, stop in limits), dtype=flat.dtype, device=flat.device)
    for transfers in tree_rounds(grid.world.ranks, chunks):
        operations, added = [], None
        for transfer in transfers:
            start, stop = limits[transfer.chunk]
            if start == stop or rank not in (transfer.source, transfer.target):
                continue
            part = flat[start:stop]
            peer = transfer.target
            if rank == transfer.target:
                peer = transfer.source
                added = part if transfer.adds else None
                part = arrived[: stop - start] if transfer.adds else part
            kind = dist.isend if rank == transfer.source else dist.irecv
            # As bytes: backends know few dtypes.
            operations.append(dist.P2POp(kind, part.view(torch.uint8), group=group, group_peer=peer))
        if operations:
            yield from dist.batch_isend_irecv(operations)
        if added is not None:
            added += arrived[: added.numel()]
