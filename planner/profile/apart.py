"""The links inside nodes and those between them, measured apart where there are both.

Inside: the ranks of each node among themselves, all nodes at once. Between: each rank with those of its place in the
other nodes, so that the ranks of a node share its cards, as the phases of a hierarchical collective do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from planner.cost.collectives import Coefficients, solve_link
from planner.profile.document import Line, Link, Sample
from planner.profile.links import LinkTimes, measure_part
from planner.progress import Progress
from runtime.errors import CommunicationError
from runtime.world import World, first_line

INSIDE = ("all_reduce", "reduce_scatter", "all_gather")
BETWEEN = ("all_reduce", "all_gather", "reduce_scatter")
"""The phases of hierarchical collectives and of delay between nodes; link constants follow from the all-reduce."""


@dataclass(frozen=True)
class LinksApart:
    """Both kinds of link: their constants, and curves whose names begin with `intra/` and `inter/`."""

    intra: Link
    inter: Link
    times: LinkTimes

    def beside(self, flat: LinkTimes) -> LinkTimes:
        """These curves after those of the collectives over all ranks."""
        return replace(flat, samples=flat.samples | self.times.samples, lines=flat.lines | self.times.lines)


def parts_of(nodes: Sequence[str]) -> tuple[list[list[int]], list[list[int]]] | None:
    """(ranks by node, ranks by place within their node), given every rank's node; None where one link is all.

    Uneven nodes have no such places.
    """
    inside = [[rank for rank, node in enumerate(nodes) if node == name] for name in dict.fromkeys(nodes)]
    count = len(inside[0])
    if len(inside) == 1 or count == 1 or any(len(ranks) != count for ranks in inside):
        return None
    return inside, [list(ranks) for ranks in zip(*inside, strict=True)]


def measure_apart(
    world: World, nodes: Sequence[str], device: torch.device, model_bytes: int, progress: Progress
) -> LinksApart | None:
    """Times the phases of hierarchical collectives; None where there is one kind of link. Every rank calls it.

    Raises:
        CommunicationError: a rank died or missed the deadline.
    """
    parts = parts_of(nodes)
    if parts is None:
        return None
    per_node = len(parts[0][0])
    samples: dict[str, tuple[Sample, ...]] = {}
    lines: dict[str, Line] = {}
    links: dict[str, Link] = {}
    kinds = (("intra", parts[0], INSIDE, model_bytes), ("inter", parts[1], BETWEEN, model_bytes // per_node))
    for kind, ranks, names, largest_bytes in kinds:
        found = _measure(world, ranks, device, largest_bytes, names, progress, kind)
        samples |= {f"{kind}/{name}": curve for name, curve in found.samples.items()}
        lines |= {f"{kind}/{name}": line for name, line in found.lines.items()}
        links[kind] = implied_link(found.lines["all_reduce"], len(ranks[0]), 1 if kind == "intra" else per_node)
    return LinksApart(links["intra"], links["inter"], LinkTimes(samples, {}, lines))


def implied_link(all_reduce: Line, ranks: int, sharing: int) -> Link:
    """The constants of a link over which so many all-reduces (rings) went at once, each of `ranks` ranks."""
    measured = Coefficients(all_reduce.alpha_us, all_reduce.beta_us_per_byte)
    link = solve_link("all_reduce/ring", ranks, measured)
    return Link(alpha_us=round(link.alpha_us, 3), beta_us_per_byte=float(f"{link.beta_us_per_byte / sharing:.6g}"))


def _measure(
    world: World, ranks: Sequence[Sequence[int]], device: torch.device, largest_bytes: int, names: Sequence[str],
    progress: Progress, kind: str,
) -> LinkTimes:  # fmt: skip
    part = world.split(ranks)
    try:
        with world.naming("timing the collectives"):
            return measure_part(world, part, device, largest_bytes, names, progress, kind)
    except CommunicationError as error:
        # The part knows its ranks by other numbers.
        raise CommunicationError(
            f"rank {world.rank}: timing the collectives ({kind}): another rank died or did not answer within "
            f"{world.timeout_s:g} s ({first_line(error.__cause__ or error)})"
        ) from error
    finally:
        part.leave()
