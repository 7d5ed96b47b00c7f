"""How a bucket may travel where there are two kinds of link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.phases import measured_curve
from planner.model.problem import Problem
from runtime.errors import InputError

DENSE = ("library", "torus_2d")
SPARSE = ("flat", "hitopk")
PHASED = frozenset({"torus_2d", "hitopk"})
"""Inside nodes, between them, and inside again; the others keep the links between nodes busy alone."""


@dataclass(frozen=True)
class Form:
    """How a bucket may travel."""

    algorithm: str
    ratio: float = 1.0
    """Of its elements to those that travel, at the most; 1: dense."""

    @property
    def phased(self) -> bool:
        """Whether it is inside nodes, too."""
        return self.algorithm in PHASED


def has_two_links(problem: Problem) -> bool:
    """Whether there are several nodes of several ranks, and costs for both kinds of link."""
    cluster = problem.cost.cluster
    if cluster.nodes == 1 or cluster.ranks_per_node == 1:
        return False
    try:
        return bool(problem.phases("all_reduce", "torus_2d"))
    except InputError:
        return False


def dense_algorithms(problem: Problem) -> tuple[str, ...]:
    """Algorithms that a dense bucket may have: trees, too, where they and the library are known equally well.

    What a tree costs by formula says little beside what the library was measured to take, which may use trees itself.
    NaiveAG is not among the sparse ones: it sends what `flat` does, and starts up twice.
    """
    cluster = problem.cost.cluster
    if measured_curve(cluster, "all_reduce") is not None and measured_curve(cluster, "tree") is None:
        return DENSE
    try:
        return (*DENSE, "tree") if problem.phases("all_reduce", "tree") else DENSE
    except InputError:
        return DENSE


def forms_of(ratios: Sequence[float], dense: Sequence[str] = DENSE) -> tuple[Form, ...]:
    """Dense (first), then flat and by phases at every ratio above 1."""
    sparse = [Form(algorithm, ratio) for ratio in ratios if ratio > 1.0 for algorithm in SPARSE]
    return (*(Form(algorithm) for algorithm in dense), *sparse)
