"""Intra-node and inter-node links, measured apart where there are both.

Inside: the ranks of each node among themselves, all nodes at once. Between: each rank with those of its place in the
other nodes, so that the ranks of a node share its cards, as the phases of a hierarchical collective do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from planner.cost.collectives import Coefficients, solve_link
from planner.documents.profile import Line, Link, Sample
from planner.profile.links import LONGEST_S, LinkTimes, cut_short, measure_part
from planner.profile.progress import Progress
from runtime.comm.world import World, first_line
from runtime.errors import CommunicationError

INSIDE = ("all_reduce", "reduce_scatter", "all_gather")
BETWEEN = ("all_reduce", "all_gather", "reduce_scatter")
"""The phases of hierarchical collectives and of delay between nodes; link constants follow from the all-reduce."""


@dataclass(frozen=True)
class LinkProfile:
    """Both kinds of link: curves whose names begin with `intra/` and `inter/`, and constants."""

    times: LinkTimes
    intra: Link | None = None
    """None where no all-reduce was asked for."""
    inter: Link | None = None
    cut: tuple[str, ...] = ()
    """Which curves end before the largest message."""


def parts_of(nodes: Sequence[str]) -> tuple[list[list[int]], list[list[int]]] | None:
    """Return (ranks by node, ranks by local rank), given every rank's node; None where there is one kind of link only,
    and for nodes of different sizes.
    """
    inside = [[rank for rank, node in enumerate(nodes) if node == name] for name in dict.fromkeys(nodes)]
    count = len(inside[0])
    if len(inside) == 1 or count == 1 or any(len(ranks) != count for ranks in inside):
        return None
    return inside, [list(ranks) for ranks in zip(*inside, strict=True)]


def measure_apart(
    world: World, nodes: Sequence[str], device: torch.device, model_bytes: int, progress: Progress,
    inside: Sequence[str] = INSIDE, between: Sequence[str] = BETWEEN, longest_s: float = LONGEST_S,
) -> LinkProfile | None:  # fmt: skip
    """Times the phases of hierarchical collectives; None where there is one kind of link. Every rank calls it.

    Args:
        world: all ranks.
        nodes: of each rank.
        device: of the messages.
        model_bytes: of the largest message.
        progress: told of each pass.
        inside: collectives inside nodes.
        between: collectives between nodes.
        longest_s: what each of them may take.

    Raises:
        CommunicationError: a rank died or missed the deadline.
    """
    parts = parts_of(nodes)
    if parts is None:
        return None
    ranks_per_node = len(parts[0][0])
    samples: dict[str, tuple[Sample, ...]] = {}
    lines: dict[str, Line] = {}
    links: dict[str, Link] = {}
    cut: list[str] = []
    kinds = (("intra", parts[0], inside, model_bytes), ("inter", parts[1], between, model_bytes // ranks_per_node))
    for kind, ranks, names, largest_bytes in kinds:
        if not names:
            continue
        part = world.split(ranks)
        try:
            with world.error_context("timing the collectives"):
                found = measure_part(world, part, device, largest_bytes, names, progress, kind, longest_s)
        except CommunicationError as error:
            # The part knows its ranks by other numbers.
            raise CommunicationError(
                f"rank {world.rank}: timing the collectives ({kind}): another rank died or did not answer within "
                f"{world.timeout_s:g} s ({first_line(error.__cause__ or error)})"
            ) from error
        finally:
            part.leave()
        samples |= {f"{kind}/{name}": curve for name, curve in found.samples.items()}
        lines |= {f"{kind}/{name}": line for name, line in found.lines.items()}
        cut += [f"{kind}/{sentence}" for sentence in cut_short(found, largest_bytes)]
        if "all_reduce" in names:
            links[kind] = implied_link(
                found.lines["all_reduce"], len(ranks[0]), 1 if kind == "intra" else ranks_per_node
            )
    return LinkProfile(LinkTimes(samples, {}, lines), links.get("intra"), links.get("inter"), tuple(cut))


def implied_link(all_reduce: Line, ranks: int, sharing: int) -> Link:
    """The constants of a link over which so many all-reduces (rings) went at once, each of `ranks` ranks."""
    measured = Coefficients(all_reduce.alpha_us, all_reduce.beta_us_per_byte)
    link = solve_link("all_reduce/ring", ranks, measured)
    return Link(alpha_us=round(link.alpha_us, 3), beta_us_per_byte=float(f"{link.beta_us_per_byte / sharing:.6g}"))
