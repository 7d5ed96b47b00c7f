"""The partition of samples among nodes, and the order in which ranks read those of an epoch.

Pure functions of seed, epoch and what was read already, which every process computes alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch


@dataclass(frozen=True)
class Partition:
    """Indices 0 … samples − 1, drawn at random for the nodes in proportion to their ranks.

    At random, because datasets lie sorted by class or source, and a node sees only its own part.
    """

    samples: int
    node_of_rank: tuple[int, ...]
    """Node of each rank; nodes are numbered from 0 by their first ranks."""
    seed: int = 0

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return max(self.node_of_rank) + 1

    def ranks_of(self, node: int) -> list[int]:
        """Return the ranks of a node."""
        return [rank for rank, one in enumerate(self.node_of_rank) if one == node]

    @cached_property
    def bounds(self) -> list[int]:
        """Begin of each node's part among the drawn indices, and the end of the last one."""
        ranks = np.bincount(self.node_of_rank, minlength=self.nodes)
        return [int(before) * self.samples // len(self.node_of_rank) for before in (0, *np.cumsum(ranks))]

    @cached_property
    def _drawn(self) -> np.ndarray:
        return np.random.default_rng([self.seed, 0]).permutation(self.samples)

    @cached_property
    def _places(self) -> np.ndarray:
        """Return the place of each index among the drawn ones."""
        places = np.empty(self.samples, dtype=np.int64)
        places[self._drawn] = np.arange(self.samples)
        return places

    def part(self, node: int) -> np.ndarray:
        """Return the indices of a node, in ascending order (int64)."""
        if self.nodes == 1:
            return np.arange(self.samples)
        return np.sort(self._drawn[self.bounds[node] : self.bounds[node + 1]])

    def size(self, node: int) -> int:
        """Return the number of a node's samples."""
        return self.bounds[node + 1] - self.bounds[node]

    def slot(self, index: int, node: int) -> int:
        """Return the place of an index among a node's; negative if it is another node's."""
        if self.nodes == 1:
            return index
        place = int(self._places[index]) - self.bounds[node]
        return place if 0 <= place < self.size(node) else -1

    def owners(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the node of each index (int64)."""
        if self.nodes == 1:
            return np.zeros(len(indices), dtype=np.int64)
        owners: np.ndarray = np.searchsorted(self.bounds, self._places[np.asarray(indices)], side="right") - 1
        return owners

    def owned(self, node: int) -> np.ndarray | None:
        """Return for each index whether it is the node's (bool); None if there is one node."""
        return None if self.nodes == 1 else self.owners(np.arange(self.samples)) == node

    def __reduce__(self) -> tuple[object, ...]:
        return Partition, (self.samples, self.node_of_rank, self.seed)  # the arrays are quickly made again


def numbered(names: Sequence[object]) -> tuple[int, ...]:
    """Number nodes by name: 0 for the first rank's, then in order of appearance."""
    order = list(dict.fromkeys(names))
    return tuple(map(order.index, names))


@dataclass(frozen=True)
class Rules:
    """Options of a sampler that decide the order of an epoch; equal on all ranks."""

    shuffle: bool
    full: bool
    """Whether to shuffle over all samples, instead of within each node's."""
    seed: int
    drop_last: bool


@dataclass(frozen=True)
class Stage:
    """A part of an epoch that some number of ranks did: `done` samples each, before a run went on with other ranks."""

    node_of_rank: tuple[int, ...]
    done: int


def per_rank(samples: int, ranks: int, drop_last: bool) -> int:
    """Return how many samples each rank reads: DistributedSampler's rule."""
    return samples // ranks if drop_last else -(-samples // ranks)


def epoch_orders(partition: Partition, rules: Rules, epoch: int, before: tuple[Stage, ...] = ()) -> np.ndarray:
    """Return indices by rank and place (int64, `[ranks, samples per rank]`).

    Without `before` it is a whole epoch. With it, it is what remains of an epoch after these stages, dealt out evenly
    to the ranks of `partition`, whichever node keeps it in memory.
    """
    if not before:
        if not rules.full:
            return _parted(partition, rules, epoch)
        # The very indices of `torch.utils.data.DistributedSampler`.
        indices = np.arange(partition.samples)
        if rules.shuffle:
            generator = torch.Generator().manual_seed(rules.seed + epoch)
            indices = torch.randperm(partition.samples, generator=generator).numpy()
        return _dealt(indices, len(partition.node_of_rank), rules.drop_last)
    *earlier, last = before
    ranks_then = Partition(partition.samples, last.node_of_rank, partition.seed)
    orders = epoch_orders(ranks_then, rules, epoch, tuple(earlier))
    # What earlier stages read is in none of the later ones but as padding, which must not come once more.
    remaining = np.setdiff1d(orders[:, last.done :], orders[:, : last.done])
    if rules.shuffle:
        remaining = np.random.default_rng([rules.seed, 2, epoch, len(before)]).permutation(remaining)
    return _dealt(remaining, len(partition.node_of_rank), rules.drop_last)


def _dealt(indices: np.ndarray, ranks: int, drop_last: bool) -> np.ndarray:
    """Deal indices to ranks, one by one; the first ones again if ranks do not divide them."""
    each = per_rank(len(indices), ranks, drop_last)
    return _filled(indices, each * ranks).reshape(each, ranks).T


def _filled(indices: np.ndarray, length: int) -> np.ndarray:
    """Return the first `length` indices, over and over again if there are fewer."""
    return np.resize(indices, length) if len(indices) else np.empty(0, dtype=np.int64)


def _parted(partition: Partition, rules: Rules, epoch: int) -> np.ndarray:
    """Return every node's own indices, shuffled among its ranks; filled up, if they are fewer than its ranks read."""
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
