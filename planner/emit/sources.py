"""Where the numbers of a plan came from, in words."""

from __future__ import annotations

from planner.documents.profile import Cluster, Contention, Link, Profile
from planner.model.problem import Problem
from runtime.version import __version__


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def three_digits(value: float) -> str:
    """Three significant digits; more where the number has more before its point."""
    return f"{value:,.0f}" if 999.5 <= value < 1e15 else f"{value:,.3g}"


def describe_sources(problem: Problem) -> dict[str, str]:
    """Model, cluster, and what compute and communication times rest on."""
    return {
        "model": _model(problem),
        "cluster": _cluster(problem.cost.cluster),
        "compute": _compute(problem.profile),
        "communication": _communication(problem),
        "planner": f"version {__version__}",
    }


def _model(problem: Problem) -> str:
    gradients = problem.profile.compute.gradients
    dtypes = ", ".join(dict.fromkeys(gradient.dtype for gradient in gradients))
    size_mib = int(problem.size_bytes.sum()) / 2**20
    return (
        f"{problem.profile.model.name}: {counted(len(gradients), 'gradient')}, {three_digits(size_mib)} MiB, {dtypes}"
    )


def _cluster(cluster: Cluster) -> str:
    ranks = f"{counted(cluster.nodes, 'node')} × {counted(cluster.ranks_per_node, 'rank')}"
    links = [
        f"{name} {_link(link)}"
        for name, link in (("inside a node", cluster.intra), ("between nodes", cluster.inter))
        if link is not None
    ]
    name = cluster.name or "unnamed"
    return "; ".join([f"{name}: {ranks}", *links, *_origin(cluster)])


def _origin(document: Cluster | Profile) -> list[str]:
    """What a document says of where it is from, and what to mind."""
    source = [f"source: {document.source}"] if document.source else []
    return source + [f"note: {note}" for note in document.notes or ()]


def short(text: str) -> str:
    """The first of several parts: a cluster's name, nodes and ranks; what was profiled; how costs were found."""
    return text.partition("; ")[0]


def short_with_source(text: str) -> str:
    """The first part, and where it is from."""
    first, *others = text.split("; ")
    return "; ".join([first, *(part for part in others if part.startswith("source: "))])


def _link(link: Link) -> str:
    speed = f"{1e-3 / link.beta_us_per_byte:,.3g} GB/s" if link.beta_us_per_byte > 0.0 else "no cost per byte"
    return f"{link.alpha_us:,.3g} µs start-up and {speed}"


def _compute(profile: Profile) -> str:
    world = profile.world
    here = [world.accelerator or world.device, world.backend, f"torch {world.torch}" if world.torch else None]
    if world.batch_per_rank is not None:
        here.append(f"batch of {world.batch_per_rank} a rank")
    if world.threads_per_rank is not None and world.cores is not None:
        here.append(f"{counted(world.threads_per_rank, 'thread')} a rank on {counted(world.cores, 'core')}")
    text = f"profile of {counted(world.ranks, 'rank')}"
    known = ", ".join(item for item in here if item)
    text += f" ({known})" if known else ""
    text += f", measured {world.measured}" if world.measured else ", without a date"
    text += f", medians of {counted(profile.compute.repeats, 'step')}" if profile.compute.repeats else ""
    return "; ".join([text, *_origin(profile)])


def _communication(problem: Problem) -> str:
    cost = problem.cost
    text = f"all-reduce on {counted(problem.ranks, 'rank')}: {cost.source}"
    samples = cost.cluster.samples or {}
    if "samples" in cost.source and samples:
        sizes = [size for curve in samples.values() for size, _ in curve]
        text += f", messages of {min(sizes):,.0f} to {max(sizes):,.0f} bytes"
    if cost.extrapolated:
        text += ", extrapolated from another number of ranks"
    if problem.contended:
        factors = problem.contention
        text += f"; while both are busy, {slower(factors)}"
    return text


def slower(factors: Contention) -> str:
    """Contention factors in words: from the largest message that was measured to the smallest."""
    network = f"{factors.network:.3g}"
    if factors.by_size is not None:
        sizes = sorted(factors.by_size)
        network = f"{sizes[-1][2]:.3g} (large messages) to {sizes[0][2]:.3g} (small ones)"
    return f"compute takes {factors.compute:.3g} × and the network {network} × as long"
