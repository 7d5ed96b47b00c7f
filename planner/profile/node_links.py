"""Intra-node and inter-node links, measured apart where there are both.

Inside: the ranks of each node among themselves, all nodes at once. Between: each rank with those of its place in the
other nodes, so that the ranks of a node share its cards, as the phases of a hierarchical collective do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from planner.cost.collectives import Coefficients, solve_link
from planner.documents.profile import Line, Link
from planner.profile.links import Curve, LinkTimes, cut_short, fit, measure_part
from planner.profile.progress import Progress
from runtime.comm.world import World, first_line
from runtime.errors import CommunicationError

Parts = tuple[list[list[int]], list[list[int]]]
"""(ranks by node, ranks by local rank)."""


def parts_of(nodes: Sequence[str]) -> Parts | None:
    """Return the parts, given every rank's node; None where there is one kind of link only, and for uneven nodes."""
    inside = [[rank for rank, node in enumerate(nodes) if node == name] for name in dict.fromkeys(nodes)]
    count = len(inside[0])
    if len(inside) == 1 or count == 1 or any(len(ranks) != count for ranks in inside):
        return None
    return inside, [list(ranks) for ranks in zip(*inside, strict=True)]


def measure_apart(
    world: World, parts: Parts, device: torch.device, model_bytes: int, progress: Progress, inside: Sequence[str],
    between: Sequence[str], longest_s: float,
) -> LinkTimes:  # fmt: skip
    """Time the phases of hierarchical collectives, those `inside` nodes and `between` them; every rank calls it.

    The largest message has `model_bytes`, and each collective takes at most `longest_s`.

    Raises:
        CommunicationError: a rank died or missed the deadline.
    """
    ranks_per_node = len(parts[0][0])
    samples: dict[str, Curve] = {}
    links: dict[str, Link] = {}
    cut: tuple[str, ...] = ()
    kinds = (("intra", parts[0], inside, model_bytes), ("inter", parts[1], between, model_bytes // ranks_per_node))
    for kind, ranks, names, largest_bytes in kinds:
        if not names:
            continue
        part = world.split(ranks)
        try:
            with world.error_context("timing the collectives"):
                curves = measure_part(world, part, device, largest_bytes, names, progress, kind, longest_s)
        except CommunicationError as error:
            # The part knows its ranks by other numbers.
            raise CommunicationError(
                f"rank {world.rank}: timing the collectives ({kind}): another rank died or did not answer within "
                f"{world.timeout_s:g} s ({first_line(error.__cause__ or error)})"
            ) from error
        finally:
            part.leave()
        samples |= curves
        cut += cut_short(curves, largest_bytes)
        if "all_reduce" in names:
            sharing = 1 if kind == "intra" else ranks_per_node
            links[kind] = implied_link(fit(curves[f"{kind}/all_reduce"]), len(ranks[0]), sharing)
    return LinkTimes(samples, links=links, cut=cut)


def implied_link(all_reduce: Line, ranks: int, sharing: int) -> Link:
    """Return the constants of a link over which so many all-reduces (rings) went at once, each of `ranks` ranks."""
    link = solve_link("all_reduce/ring", ranks, Coefficients.of(all_reduce))
    return Link(alpha_us=round(link.alpha_us, 3), beta_us_per_byte=float(f"{link.beta_us_per_byte / sharing:.6g}"))
