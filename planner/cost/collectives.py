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

from planner.documents.profile import Line, Link
from runtime.errors import InputError


class Coefficients(NamedTuple):
    """Start-up time and time per byte of a collective: time_us = start_up_us + per_byte_us · bytes."""

    start_up_us: float
    per_byte_us: float

    @classmethod
    def of(cls, line: Line) -> Coefficients:
        """Return those of a fitted line."""
        return cls(line.alpha_us, line.beta_us_per_byte)


def log2_steps(ranks: int) -> int:
    """Return ⌈log2 P⌉."""
    return math.ceil(math.log2(ranks))


COLLECTIVE_COSTS: Mapping[str, Callable[[int, float, float, float], tuple[float, float]]] = {
    "all_gather/recursive_doubling": lambda p, a, b, _: (log2_steps(p) * a, (p - 1) / p * b),
    "all_gather/ring": lambda p, a, b, _: ((p - 1) * a, (p - 1) / p * b),
    "all_reduce/binary_tree": lambda p, a, b, g: (2 * log2_steps(p) * a, log2_steps(p) * (2 * b + g)),
    "all_reduce/halving_doubling": lambda p, a, b, g: (2 * log2_steps(p) * a, 2 * b - (2 * b + g) / p + g),
    "all_reduce/recursive_doubling": lambda p, a, b, g: (log2_steps(p) * a, log2_steps(p) * (b + g)),
    "all_reduce/ring": lambda p, a, b, g: (2 * (p - 1) * a, 2 * (p - 1) / p * b + (p - 1) / p * g),
    "reduce_scatter/ring": lambda p, a, b, g: ((p - 1) * a, (p - 1) / p * (b + g)),
}
"""Registry: `collective/algorithm` → its start-up time and time per byte from P, α, β and γ. Add a formula here and the
contract test covers it."""


def collective_cost(name: str, ranks: int, link: Link) -> Coefficients:
    """Return the cost of one collective, nothing for a single rank. Raises InputError for an unknown name."""
    if name not in COLLECTIVE_COSTS:
        raise InputError(f"no cost formula {name!r}; known: {', '.join(COLLECTIVE_COSTS)}")
    if ranks == 1:
        return Coefficients(0.0, 0.0)
    formula = COLLECTIVE_COSTS[name]
    return Coefficients(*formula(ranks, link.alpha_us, link.beta_us_per_byte, link.gamma_us_per_byte))


def solve_link(name: str, ranks: int, measured: Coefficients) -> Link:
    """Return the link constants that make formula `name` on `ranks` ranks give `measured` (γ is taken as 0).

    Every formula is linear in α and in β, so one evaluation with α = β = 1 gives the factors.
    """
    unit = collective_cost(name, ranks, Link(alpha_us=1.0, beta_us_per_byte=1.0))
    return Link(
        alpha_us=measured.start_up_us / unit.start_up_us, beta_us_per_byte=measured.per_byte_us / unit.per_byte_us
    )
