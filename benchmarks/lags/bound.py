"""Eq. 20 of LAGS-SGD: how much faster than SLGS it can be at most, beside what is simulated and what is measured.

Both send the same share of every layer. SLGS sends it as one message behind backward, LAGS layer by layer beside it:
S ≤ (t_f + t_b + t_c) / (t_f + max(t_b, t_c)), with t_c what SLGS's message takes. It is largest where t_c = t_b.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from planner.cost.sparse import flat_is_implied
from planner.documents.profile import Cluster, Link, Profile
from planner.ir import Bucket, Schedule
from planner.model.codecs import TopK
from planner.model.modes import simulate_schedule
from planner.model.problem import Problem, make_problem
from planner.model.spending import spending
from runtime.plan.transports import FLAT

DENSITY = 0.01
RATIOS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, 10.0)
"""Values of r = t_c / t_b."""


def layer_wise(problem: Problem, density: float) -> Schedule:
    """One message for each layer with this share of its elements."""
    buckets = []
    for start, stop in problem.layer_runs:
        bucket = Bucket(tuple(range(start, stop)))
        ks = [max(1, math.floor(density * numel)) for numel in problem.layer_elements(bucket)]
        buckets.append(Bucket(bucket.gradients, FLAT, TopK.of_layers(ks)))
    return Schedule(buckets=tuple(buckets))


def at_once(problem: Problem, density: float) -> Schedule:
    """The same elements in one message behind backward."""
    k = sum(max(1, math.floor(density * int(problem.numel[start:stop].sum()))) for start, stop in problem.layer_runs)
    return Schedule(buckets=(_sparse(tuple(range(problem.count)), k),))


def _sparse(gradients: tuple[int, ...], k: int) -> Bucket:
    return Bucket(gradients, FLAT, TopK(k))


def bound(forward_us: float, backward_us: float, message_us: float) -> float:
    """Eq. 20."""
    return (forward_us + backward_us + message_us) / (forward_us + max(backward_us, message_us))


def on_link(profile: Profile, ranks: int, alpha_us: float, beta_us_per_byte: float) -> Problem:
    """The profile's step on a cluster with one kind of link, without selection costs and contention."""
    link = Link(alpha_us=alpha_us, beta_us_per_byte=beta_us_per_byte)
    problem = make_problem(profile, Cluster(nodes=ranks, inter=link))
    assert not flat_is_implied(problem.cost.cluster)
    return problem


def message_us(problem: Problem) -> float:
    """What SLGS's message takes."""
    return sum(message.time_us for message in spending(problem, at_once(problem, DENSITY).buckets[0]).messages)


def simulated(profile: Profile, ranks: int = 16, alpha_us: float = 0.0) -> Iterator[tuple[float, float, float]]:
    """(r, Eq. 20's bound, simulated speed-up of LAGS over SLGS) over links of different bandwidth."""
    one = message_us(on_link(profile, ranks, 0.0, 1.0))
    for ratio in RATIOS:
        backward_us = sum(gradient.backward_us for gradient in profile.compute.gradients)
        problem = on_link(profile, ranks, alpha_us, ratio * backward_us / one)
        # The update is in neither of the paper's sums.
        quiet = replace(profile, compute=replace(profile.compute, update_us=0.0))
        problem = Problem(profile=quiet, cost=problem.cost)
        slgs = simulate_schedule(problem, at_once(problem, DENSITY)).iteration_us
        lags = simulate_schedule(problem, layer_wise(problem, DENSITY)).iteration_us
        took_us = message_us(problem)
        yield took_us / backward_us, bound(problem.forward_us, backward_us, took_us), slgs / lags


def lines(rows: Sequence[tuple[float, float, float]]) -> Iterator[str]:
    """One row per r."""
    yield "| r = t_c / t_b | Eq. 20 | simulated |"
    yield "| --- | --- | --- |"
    for ratio, most, found in rows:
        yield f"| {ratio:.2f} | {most:.3f} | {found:.3f} |"
