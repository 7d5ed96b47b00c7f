"""Sources of the numbers in a plan, as text."""

from __future__ import annotations

from planner.documents.profile import Cluster, Link, Profile
from planner.documents.text import BOTH_BUSY, describe_contention, mib, pluralize
from planner.model.problem import Problem
from runtime.version import __version__


def describe_sources(problem: Problem) -> dict[str, str]:
    """Return the sources of model, sizes of tensors, cluster, compute times and communication times, by name."""
    return {
        "model": _model(problem),
        "tensors": _tensors(problem),
        "cluster": _cluster(problem.cost.cluster),
        "compute": _compute(problem),
        "communication": _communication(problem),
        "planner": f"version {__version__}",
    }


def _model(problem: Problem) -> str:
    gradients = problem.profile.compute.gradients
    dtypes = ", ".join(dict.fromkeys(gradient.dtype for gradient in gradients))
    size = mib(int(problem.size_bytes.sum()))
    return f"{problem.profile.model.name}: {pluralize(len(gradients), 'gradient')}, {size}, {dtypes}"


TENSOR_KIB = (1, 16, 256, 4096)
"""Upper ends of the classes of sizes by which tensors are counted."""


def _tensors(problem: Problem) -> str:
    """Return the number of tensors, and their share of the bytes, by size (MG-WFBP, Fig. 5)."""
    size_bytes = problem.size_bytes
    total_bytes, counted, low = max(1, int(size_bytes.sum())), [], -1
    for kib in (*TENSOR_KIB, None):
        high = int(size_bytes.max()) if kib is None else 1024 * kib
        inside = size_bytes[(size_bytes > low) & (size_bytes <= high)]
        if inside.size:
            name = f"above {TENSOR_KIB[-1]:,} KiB" if kib is None else f"up to {kib:,} KiB"
            counted.append(f"{inside.size} {name} ({int(inside.sum()) / total_bytes:.0%} of the bytes)")
        low = high
    return ", ".join(counted)


def _cluster(cluster: Cluster) -> str:
    ranks = f"{pluralize(cluster.nodes, 'node')} × {pluralize(cluster.ranks_per_node, 'rank')}"
    links = [
        f"{name} {_link(link)}"
        for name, link in (("inside a node", cluster.intra), ("between nodes", cluster.inter))
        if link is not None
    ]
    name = cluster.name or "unnamed"
    return "; ".join([f"{name}: {ranks}", *links, *_origin(cluster)])


def _origin(document: Cluster | Profile) -> list[str]:
    """Return the source and the notes of a document."""
    source = [f"source: {document.source}"] if document.source else []
    return source + [f"note: {note}" for note in document.notes or ()]


def _link(link: Link) -> str:
    speed = f"{1e-3 / link.beta_us_per_byte:,.3g} GB/s" if link.beta_us_per_byte > 0.0 else "no cost per byte"
    return f"{link.alpha_us:,.3g} µs start-up and {speed}"


def _compute(problem: Problem) -> str:
    profile, basis = problem.profile, problem.basis
    world = profile.world
    scaled = [] if basis is None or basis.basis != "scaled" else [str(basis)]
    here = [world.accelerator or world.device, world.backend, f"torch {world.torch}" if world.torch else None]
    if world.batch_per_rank is not None:
        here.append(f"batch of {world.batch_per_rank} a rank")
    if world.threads_per_rank is not None and world.cores is not None:
        here.append(f"{pluralize(world.threads_per_rank, 'thread')} a rank on {pluralize(world.cores, 'core')}")
    text = f"profile of {pluralize(world.ranks, 'rank')}"
    known = ", ".join(item for item in here if item)
    text += f" ({known})" if known else ""
    text += f", measured {world.measured}" if world.measured else ", without a date"
    text += f", medians of {pluralize(profile.compute.repeats, 'step')}" if profile.compute.repeats else ""
    return "; ".join([text, *scaled, *_origin(profile)])


def _communication(problem: Problem) -> str:
    cost = problem.cost
    text = f"all-reduce on {pluralize(problem.ranks, 'rank')}: {cost.source}"
    samples = cost.cluster.samples or {}
    if "samples" in cost.source and samples:
        sizes = [size for curve in samples.values() for size, _ in curve]
        text += f", messages of {min(sizes):,.0f} to {max(sizes):,.0f} bytes"
    if cost.extrapolated:
        text += ", extrapolated from another number of ranks"
    if problem.contended:
        factors = problem.contention
        text += f"; {BOTH_BUSY}, {describe_contention(factors)}"
    return text
