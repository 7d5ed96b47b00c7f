"""`--solver cpsat`: an independent check of a schedule by constraint programming: a better one, and a bound.

The dynamic programs stay the default: on one network without contention they are exact, and a thousand times as fast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from planner.ir import Schedule
from planner.model.modes import best_of, simulate_schedule
from planner.model.problem import Problem
from planner.model.step import Overlap
from planner.model.updates import update_bound_us
from planner.passes.merge import boundaries, merge_problem, merge_without_contention
from planner.passes.topology import Topology, links_without_contention
from planner.search.cpsat import TIME_LIMIT, Solution, solve_merge, solve_two_links
from planner.search.cpsat_joint import MAX_LINK_PLACES, solve_joint
from planner.search.forms import LinkForms
from planner.search.tables import bucket_tables, dense_transports, forms_on_links, has_two_links
from planner.strategies.topologies import phased_problem
from runtime.errors import CheckFailed, InputError
from runtime.plan.combinations import COMBINATIONS, SHARDED, SOLVER
from runtime.plan.transports import TORUS_2D

SOLVERS = ("dp", "cpsat")
"""The dynamic programs alone, or with the constraint program after them."""

SOLVABLE = ("optimal", TORUS_2D.algorithm)
"""Strategies that look for the best schedule; the others follow a fixed rule."""

SOLVER_SKIPPED = f"the solver cpsat was not asked, for {COMBINATIONS[SHARDED][SOLVER]}"

MAX_LIMIT = 3600.0

AGREEMENT = 1e-9
"""Relative difference of two optima of one problem beyond which one of them is wrong."""


@dataclass(frozen=True, kw_only=True)
class Solved:
    """A schedule that is no worse than the one given, and what the solver proved of the step."""

    schedule: Schedule
    bound_us: float
    """Lower bound on steps of this class."""
    proven: bool
    error_us: float
    limit: float
    """Deterministic time that was allowed."""


def check_solver(solver: str, limit: float | None = None) -> float:
    """Return the limit in deterministic time (default: the solver's own).

    Raises:
        InputError: no such solver or limit.
    """
    if solver not in SOLVERS:
        raise InputError(f"--solver: found {solver!r}, expected one of: {', '.join(SOLVERS)}")
    if limit is None:
        return TIME_LIMIT
    if solver != "cpsat":
        raise InputError(f"--solver-limit: found it with the solver {solver}, expected --solver cpsat; add that")
    if not (math.isfinite(limit) and 0.0 < limit <= MAX_LIMIT):
        raise InputError(f"--solver-limit: found {limit}, expected more than 0 and at most {MAX_LIMIT:g}; correct it")
    return limit


def solve(problem: Problem, schedule: Schedule, limit: float = TIME_LIMIT) -> Solved:
    """Return the best exact schedule of the solver and the given one: of flat all-reduces, and on intra-node and
    inter-node links of all forms of dense buckets.

    Raises:
        CheckFailed: solver and dynamic program contradict each other.
        InputError: the problem is too large for this solver.
    """
    if has_two_links(problem):
        return _solve_links(problem, schedule, limit)
    overlap = Overlap.of(problem) if problem.contended else None
    arrays = merge_problem(problem)
    hint = boundaries(schedule) or merge_without_contention(problem).stops
    solution = solve_merge(arrays, hint, overlap, limit)
    if overlap is None:  # both are exact here, so neither may find or prove what the other excludes
        optimum_us, found_us = merge_without_contention(problem).end_us, arrays.end_us(solution.stops)
        room_us = AGREEMENT * optimum_us
        better = bool(solution.stops) and found_us < optimum_us - room_us
        worse = solution.proven and solution.bound_us < optimum_us - solution.error_us - room_us
        if better or worse or solution.bound_us > optimum_us + room_us:
            _contradiction("dynamic program", optimum_us, found_us, solution.bound_us)
    found = [Schedule.from_boundaries(solution.stops).with_update_of(schedule)] if solution.stops else []
    return _solved(problem, best_of(problem, [schedule, *found]), solution, limit)


def _solve_links(problem: Problem, schedule: Schedule, limit: float) -> Solved:
    """Return the best on intra-node and inter-node links, without contention."""
    if problem.count >= MAX_LINK_PLACES:
        raise InputError(
            f"the solver cpsat: found {problem.count} gradients on two kinds of link, expected at most "
            f"{MAX_LINK_PLACES - 1}; use the solver dp, which has no such limit"
        )
    known = links_without_contention(problem, Topology.climbs)
    forms = LinkForms(problem, forms_on_links((), dense_transports(problem)))
    tables = bucket_tables(problem, forms.forms, forms.limits, np.arange(problem.count + 1))
    known_us = known.end_us
    solution = solve_joint(tables, len(forms.forms), known_us, limit)
    found = tuple(zip(solution.stops, solution.forms, strict=True))
    found_us = forms.end_us(found) if found else known_us
    room_us = AGREEMENT * known_us
    excluded = solution.proven and solution.bound_us < known_us - solution.error_us - room_us
    if known.exact and (excluded or solution.bound_us > known_us + room_us or found_us < known_us - room_us):
        _contradiction("labels", known_us, found_us, solution.bound_us)
    schedules = [forms.schedule(found).with_update_of(schedule)] if found else []
    return _solved(problem, best_of(problem, [schedule, *schedules]), solution, limit)


def solve_strategy(problem: Problem, strategy: str, schedule: Schedule, limit: float = TIME_LIMIT) -> Solved | None:
    """Return what `solve` does for a strategy by name; None where that follows a fixed rule, or sends nothing."""
    if strategy == "optimal":
        return solve(problem, schedule, limit)
    arrays = phased_problem(problem) if strategy == TORUS_2D.algorithm else None
    if arrays is None:
        return None
    hint = boundaries(schedule, TORUS_2D)
    solution = solve_two_links(arrays, hint or (problem.count,), limit)
    found = [Schedule.from_boundaries(solution.stops, TORUS_2D)] if solution.stops else []
    return _solved(problem, best_of(problem, [schedule, *found]), solution, limit)


def _solved(problem: Problem, schedule: Schedule, solution: Solution, limit: float) -> Solved:
    bound_us = max(solution.bound_us, problem.compute_end_us) + update_bound_us(problem)
    return Solved(
        schedule=schedule,
        bound_us=min(bound_us, simulate_schedule(problem, schedule).iteration_us),
        proven=solution.proven,
        error_us=solution.error_us,
        limit=limit,
    )


def _contradiction(other: str, optimum_us: float, found_us: float, bound_us: float) -> NoReturn:
    raise CheckFailed(
        f"{other}: the last bucket ends after {optimum_us} us; the solver cpsat found {found_us} us and the bound "
        f"{bound_us} us, expected the same: a defect of the planner, please report the profile"
    )
