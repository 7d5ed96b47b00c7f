"""Start-up and per-byte cost of dense collectives, as published. Pure functions of ranks and one link.

Each is linear in the message: time_us = start_up_us + per_byte_us · M, where M is the full tensor that each rank
holds (all-reduce, reduce-scatter) or the full result (all-gather).

Source: MG-WFBP (Shi, Chu, Li, INFOCOM 2019), Table II; reduce-scatter and all-gather: Thakur, Rabenseifner, Gropp
(2005), as used in CommLib (Shi et al., MLSys 2021), Eq. 7-10.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from planner.documents.profile import Link
from runtime.errors import InputError


class Coefficients(NamedTuple):
    """time_us = start_up_us + per_byte_us · bytes."""

    start_up_us: float
    per_byte_us: float


CollectiveCost = Callable[[int, Link], Coefficients]


def _steps(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


def all_reduce_ring(ranks: int, link: Link) -> Coefficients:
    """2(P−1)α + (2(P−1)/P·β + (P−1)/P·γ)·M."""
    share = (ranks - 1) / ranks
    return Coefficients(
        2 * (ranks - 1) * link.alpha_us, 2 * share * link.beta_us_per_byte + share * link.gamma_us_per_byte
    )


def all_reduce_recursive_doubling(ranks: int, link: Link) -> Coefficients:
    """⌈log2 P⌉·α + ⌈log2 P⌉·(β+γ)·M."""
    steps = _steps(ranks)
    return Coefficients(steps * link.alpha_us, steps * (link.beta_us_per_byte + link.gamma_us_per_byte))


def all_reduce_halving_doubling(ranks: int, link: Link) -> Coefficients:
    """2⌈log2 P⌉·α + (2β − (2β+γ)/P + γ)·M."""
    beta, gamma = link.beta_us_per_byte, link.gamma_us_per_byte
    return Coefficients(2 * _steps(ranks) * link.alpha_us, 2 * beta - (2 * beta + gamma) / ranks + gamma)


def all_reduce_binary_tree(ranks: int, link: Link) -> Coefficients:
    """2⌈log2 P⌉·α + ⌈log2 P⌉·(2β+γ)·M."""
    steps = _steps(ranks)
    return Coefficients(2 * steps * link.alpha_us, steps * (2 * link.beta_us_per_byte + link.gamma_us_per_byte))


def reduce_scatter_ring(ranks: int, link: Link) -> Coefficients:
    """(P−1)α + (P−1)/P·(β+γ)·M."""
    share = (ranks - 1) / ranks
    return Coefficients((ranks - 1) * link.alpha_us, share * (link.beta_us_per_byte + link.gamma_us_per_byte))


def all_gather_ring(ranks: int, link: Link) -> Coefficients:
    """(P−1)α + (P−1)/P·β·M."""
    return Coefficients((ranks - 1) * link.alpha_us, (ranks - 1) / ranks * link.beta_us_per_byte)


def all_gather_recursive_doubling(ranks: int, link: Link) -> Coefficients:
    """⌈log2 P⌉·α + (P−1)/P·β·M."""
    return Coefficients(_steps(ranks) * link.alpha_us, (ranks - 1) / ranks * link.beta_us_per_byte)


COLLECTIVE_COSTS: Mapping[str, CollectiveCost] = {
    "all_gather/recursive_doubling": all_gather_recursive_doubling,
    "all_gather/ring": all_gather_ring,
    "all_reduce/binary_tree": all_reduce_binary_tree,
    "all_reduce/halving_doubling": all_reduce_halving_doubling,
    "all_reduce/recursive_doubling": all_reduce_recursive_doubling,
    "all_reduce/ring": all_reduce_ring,
    "reduce_scatter/ring": reduce_scatter_ring,
}
"""Registry: `collective/algorithm` → cost. Add a formula here and the contract test covers it."""


def collective_cost(name: str, ranks: int, link: Link) -> Coefficients:
    """The cost of one collective; nothing for a single rank.

    Raises:
        InputError: unknown name.
    """
    if name not in COLLECTIVE_COSTS:
        raise InputError(f"no cost formula {name!r}; known: {', '.join(COLLECTIVE_COSTS)}")
    return COLLECTIVE_COSTS[name](ranks, link) if ranks > 1 else Coefficients(0.0, 0.0)


def solve_link(name: str, ranks: int, measured: Coefficients) -> Link:
    """The link constants that make formula `name` on `ranks` ranks give `measured` (γ is taken as 0).

    Every formula is linear in α and in β, so one evaluation with α = β = 1 gives the factors.
    """
    unit = collective_cost(name, ranks, Link(alpha_us=1.0, beta_us_per_byte=1.0))
    return Link(
        alpha_us=measured.start_up_us / unit.start_up_us, beta_us_per_byte=measured.per_byte_us / unit.per_byte_us
    )
