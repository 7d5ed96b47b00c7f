"""In which order ranks read the samples of an epoch: pure functions of seed, epoch and what was read already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from runtime.datacache.partition import Partition


@dataclass(frozen=True)
class Rules:
    """What orders follow, beside the epoch; equal on all ranks."""

    shuffle: bool
    full: bool
    """Over all samples, instead of within each node's."""
    seed: int
    drop_last: bool


@dataclass(frozen=True)
class Stage:
    """A part of an epoch that some number of ranks did: `done` samples each, before a run went on with other ranks."""

    node_of_rank: tuple[int, ...]
    done: int


def per_rank(samples: int, ranks: int, drop_last: bool) -> int:
    """How many samples each rank reads: DistributedSampler's rule."""
    return samples // ranks if drop_last else -(-samples // ranks)


def epoch_orders(partition: Partition, rules: Rules, epoch: int, before: tuple[Stage, ...] = ()) -> np.ndarray:
    """Indices by rank and place (int64, `[ranks, samples per rank]`).

    Without `before`, a whole epoch. With it, what remains of an epoch after these stages, dealt out evenly to the ranks
    of `partition`, whoever keeps them in memory.
    """
    if not before:
        return _full(partition, rules, epoch) if rules.full else _parted(partition, rules, epoch)
    *earlier, last = before
    ranks_then = Partition(partition.samples, last.node_of_rank, partition.seed)
    orders = epoch_orders(ranks_then, rules, epoch, tuple(earlier))
    # What earlier stages read is in none of the later ones but as padding, which must not come once more.
    remaining = np.setdiff1d(orders[:, last.done :], orders[:, : last.done])
    if rules.shuffle:
        remaining = np.random.default_rng([rules.seed, 2, epoch, len(before)]).permutation(remaining)
    return _dealt(remaining, len(partition.node_of_rank), rules.drop_last)


def _dealt(indices: np.ndarray, ranks: int, drop_last: bool) -> np.ndarray:
    """Indices in turn to ranks, the first ones again where they do not divide."""
    each = per_rank(len(indices), ranks, drop_last)
    return _filled(indices, each * ranks).reshape(each, ranks).T


def _filled(indices: np.ndarray, length: int) -> np.ndarray:
    """The first `length` indices, over and over again where there are fewer."""
    return np.resize(indices, length) if len(indices) else np.empty(0, dtype=np.int64)


def _full(partition: Partition, rules: Rules, epoch: int) -> np.ndarray:
    """The very indices of `torch.utils.data.DistributedSampler`."""
    if rules.shuffle:
        generator = torch.Generator().manual_seed(rules.seed + epoch)
        indices = torch.randperm(partition.samples, generator=generator).numpy()
    else:
        indices = np.arange(partition.samples)
    return _dealt(indices, len(partition.node_of_rank), rules.drop_last)


def _parted(partition: Partition, rules: Rules, epoch: int) -> np.ndarray:
    """Every node's own indices, shuffled among its ranks; nodes have as many as their ranks read, or are filled up."""
    ranks = len(partition.node_of_rank)
    orders = np.empty((ranks, per_rank(partition.samples, ranks, rules.drop_last)), dtype=np.int64)
    for node in range(partition.nodes):
        indices = partition.part(node)
        if not len(indices):  # fewer samples than nodes
            indices = np.arange(partition.samples)
        if rules.shuffle:
            indices = np.random.default_rng([rules.seed, 1, epoch, node]).permutation(indices)
        mine = partition.ranks_of(node)
        orders[mine] = _filled(indices, orders.shape[1] * len(mine)).reshape(-1, len(mine)).T
    return orders


def to_stages(found: Any) -> tuple[Stage, ...]:
    """Stages from a checkpoint: pairs of lists and numbers. Raises TypeError or ValueError where they are none."""
    return tuple(Stage(tuple(int(node) for node in nodes), int(done)) for nodes, done in found)
