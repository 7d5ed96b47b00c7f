"""Which node keeps which samples in memory: a partition of the indices that every process computes alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


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
        """Their number."""
        return max(self.node_of_rank) + 1

    def ranks_of(self, node: int) -> list[int]:
        """The ranks of a node, in order."""
        return [rank for rank, one in enumerate(self.node_of_rank) if one == node]

    @cached_property
    def bounds(self) -> list[int]:
        """Where each node's part begins among the drawn indices, and the end of the last one."""
        ranks = np.bincount(self.node_of_rank, minlength=self.nodes)
        return [int(before) * self.samples // len(self.node_of_rank) for before in (0, *np.cumsum(ranks))]

    @cached_property
    def _drawn(self) -> np.ndarray:
        return np.random.default_rng([self.seed, 0]).permutation(self.samples)

    @cached_property
    def _places(self) -> np.ndarray:
        """Index → its place among the drawn ones."""
        places = np.empty(self.samples, dtype=np.int64)
        places[self._drawn] = np.arange(self.samples)
        return places

    def part(self, node: int) -> np.ndarray:
        """The indices of a node, in ascending order (int64)."""
        if self.nodes == 1:
            return np.arange(self.samples)
        return np.sort(self._drawn[self.bounds[node] : self.bounds[node + 1]])

    def size(self, node: int) -> int:
        """How many indices a node has."""
        return self.bounds[node + 1] - self.bounds[node]

    def slot(self, index: int, node: int) -> int:
        """The place of an index among a node's; negative where it is another node's."""
        if self.nodes == 1:
            return index
        place = int(self._places[index]) - self.bounds[node]
        return place if 0 <= place < self.size(node) else -1

    def owners(self, indices: Sequence[int]) -> np.ndarray:
        """The node of each index (int64)."""
        if self.nodes == 1:
            return np.zeros(len(indices), dtype=np.int64)
        owners: np.ndarray = np.searchsorted(self.bounds, self._places[np.asarray(indices)], side="right") - 1
        return owners

    def owned(self, node: int) -> np.ndarray | None:
        """Per index, whether it is the node's (bool); None where there is one node."""
        if self.nodes == 1:
            return None
        places = self._places
        owned: np.ndarray = (places >= self.bounds[node]) & (places < self.bounds[node + 1])
        return owned

    def __reduce__(self) -> tuple[object, ...]:
        return Partition, (self.samples, self.node_of_rank, self.seed)  # the arrays are quickly made again


def numbered(names: Sequence[object]) -> tuple[int, ...]:
    """Numbers for nodes by name: 0 for the first rank's, then in order of appearance."""
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)
