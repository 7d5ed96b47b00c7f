"""Which collective is predicted to be the fastest, by the size of the message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.cost.model import communication_cost
from planner.cost.phases import PHASES
from planner.cost.sparse import sparse_us
from planner.documents.catalog import find_cluster
from planner.documents.profile import Cluster
from planner.documents.text import format_significant
from runtime.plan.transports import transport_of

CLUSTERS = ("v100-16x8-25gbe", "a100-8x8-100gb")
DENSITY = 0.01
ELEMENT_BYTES = 4
SMALLEST, LARGEST = 2**10, 2**30
OCTAVES = 2
"""Between the rows of the table."""
STEPS = 4
"""Sizes in each octave that are looked at for a change of the fastest."""

DENSE = ("library", "tree", "torus_2d")
SPARSE = ("naive_all_gather", "flat", "hitopk")


def times_us(cluster: Cluster, size_bytes: float, algorithms: Sequence[str]) -> dict[str, float]:
    """Microseconds of one message; of selected elements without selection."""
    cost, found = communication_cost(cluster), {}
    for name in algorithms:
        if name == "library":
            found[name] = cost.all_reduce.at(size_bytes)
        elif name in DENSE:
            phases = PHASES[transport_of("all_reduce", name)](cost.cluster, cost.all_reduce, cost.link)
            found[name] = sum(phase.time_us(size_bytes) for phase in phases)
        else:
            numel = max(1, int(size_bytes) // ELEMENT_BYTES)
            found[name] = sum(
                time_us
                for _, time_us in sparse_us(transport_of("sparse", name), cluster, numel, DENSITY, ELEMENT_BYTES)
            )
    return found


def fastest(cluster: Cluster, size_bytes: float, algorithms: Sequence[str]) -> str:
    """The first of the fastest."""
    found = times_us(cluster, size_bytes, algorithms)
    return min(found, key=lambda name: found[name])


def crossings(cluster: Cluster, algorithms: Sequence[str]) -> Iterator[tuple[int, str]]:
    """(from how many bytes on, the fastest), beginning with the smallest message."""
    sizes = [round(SMALLEST * 2 ** (step / STEPS)) for step in range(STEPS * (LARGEST // SMALLEST).bit_length())]
    before, size_before = fastest(cluster, SMALLEST, algorithms), SMALLEST
    yield SMALLEST, before
    for size in sizes:
        here = fastest(cluster, size, algorithms)
        if here != before:
            low, high = size_before, size
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if fastest(cluster, middle, algorithms) == before else (low, middle)
            yield high, here
        before, size_before = here, size


def lines() -> Iterator[str]:
    """A table for each cluster, and from what size on each collective is the fastest."""
    for name in CLUSTERS:
        cluster = find_cluster(name)
        yield f"{name}: {cluster.nodes} nodes of {cluster.ranks_per_node}, µs of one message, {DENSITY:.0%} selected:"
        yield ""
        yield "| message | " + " | ".join((*DENSE, *SPARSE)) + " | fastest dense | of all |"
        yield "| --- " + "| --: " * len((*DENSE, *SPARSE)) + "| --- | --- |"
        size = SMALLEST
        while size <= LARGEST:
            times = times_us(cluster, size, (*DENSE, *SPARSE))
            cells = " | ".join(f"{times[algorithm]:,.0f}" for algorithm in times)
            best = [fastest(cluster, size, algorithms) for algorithms in (DENSE, (*DENSE, *SPARSE))]
            yield f"| {_bytes(size)} | {cells} | {' | '.join(best)} |"
            size <<= OCTAVES
        yield ""
        for what, algorithms in (("dense", DENSE), ("selected elements", SPARSE), ("all", (*DENSE, *SPARSE))):
            found = [f"`{best}` from {_bytes(start)}" for start, best in crossings(cluster, algorithms)]
            yield f"- {what}: {', '.join(found)}"
        yield ""


def _bytes(size: int) -> str:
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= factor:
            return f"{format_significant(size / factor)} {unit}"
    return f"{size} B"
