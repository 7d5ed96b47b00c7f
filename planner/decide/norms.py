"""What a plan says of the norms of layers, and the least that any split of them takes."""

from __future__ import annotations

from planner.emit.text import ms
from planner.model.norms import gather_us, norm_costs_us, replicated_us
from planner.model.problem import Problem
from runtime.plan import UpdatePlan


def update_bound_us(problem: Problem) -> float:
    """No schedule has a shorter update: norms are split evenly, as far as the largest layer lets them."""
    costs_us = norm_costs_us(problem)
    if not costs_us or problem.ranks == 1:
        return problem.update_us
    even = [index % problem.ranks for index in range(len(costs_us))]
    least_us = max(*costs_us, sum(costs_us) / problem.ranks) + gather_us(problem, even)
    return min(problem.update_us, max(0.0, problem.update_us - replicated_us(problem) + least_us))


def describe(problem: Problem, updates: UpdatePlan | None) -> list[str]:
    """What the reader of a plan should know about norms; nothing where there are none."""
    norms = updates.norms if updates else None
    profile = problem.profile.compute.norms
    if norms is None or profile is None or norms.replicated_us is None or norms.shared_us is None:
        return []
    alone, shared, gather = (ms(time_us) for time_us in (norms.replicated_us, norms.shared_us, norms.gather_us or 0.0))
    layers = f"{profile.optimizer}'s norms of {len(problem.norm_layers)} layers take {alone} by every rank"
    if norms.shares is None:
        return [f"{layers}, and would take {shared} shared, {gather} of it the all-gather: every rank computes all"]
    largest_us, bound_us = norms.shared_us - (norms.gather_us or 0.0), norms.bound_us or 0.0
    over = largest_us / bound_us - 1.0 if bound_us > 0.0 else 0.0
    best = "the least possible" if over <= 1e-3 else f"at most {over:.1%} above the least possible"
    gathered = f"and one all-gather of {norms.message_bytes} B, {gather}"
    return [f"{layers} and {shared} shared (PTO): the largest share, {best}, {gathered}"]
