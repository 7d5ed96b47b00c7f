"""`planner.simulate`: predicted step times of strategies on a cluster, over numbers of ranks. Never imports torch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from planner.cost.model import communication_cost
from planner.cost.nccl import scaled
from planner.cost.sparse import flat_is_implied
from planner.cost.wire import encoding
from planner.decide.cut_choice import cut_problem
from planner.decide.solvers import SOLVABLE, check_solver, solve_strategy
from planner.decide.strategies import accuracy_of, make_schedule, problem_of
from planner.documents.catalog import find_cluster, find_profile, name_of
from planner.documents.profile import Cluster, Profile
from planner.documents.text import as_names
from planner.ir import Schedule
from planner.model.codecs import Wire
from planner.model.delay import CycleTimeline
from planner.model.modes import model_of
from planner.model.problem import Problem, make_problem
from planner.model.what_if import WhatIf, describe, step_quantiles
from planner.strategies.sparse import ratios
from planner.verify import verify_on
from runtime.errors import InputError
from runtime.plan.timeline import Timeline, busy_us

DEFAULT_STRATEGIES = ("wfbp", "wfbp:layer", "single", "mg_wfbp", "ddp", "optimal")


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A strategy on a number of ranks, predicted."""

    strategy: str
    """Name of the strategy, as `planner.simulate` was given it."""
    ranks: int
    """Number of ranks."""
    iteration_us: float
    """Predicted time of a step, in µs."""
    exposed_us: float
    """Part of it in which communication is not hidden behind computation, in µs."""
    forward_us: float
    backward_us: float
    update_us: float
    """Time of the optimizer's step, in µs."""
    buckets: int
    """Number of buckets."""
    extrapolated: bool
    """Whether costs of messages were measured on another number of ranks."""
    cost_source: str
    """Source of the costs of messages: samples, lines, formulas or NCCL's model."""
    idle_us: dict[str, float]
    """Time that each resource is idle in a step."""
    message_bytes: dict[str, float]
    """Bytes of the messages that one rank passes to the collectives of a step (a mean one, with delay), by network."""
    speed_up: float
    """S(N): how many times as many samples all ranks process in the same time as one alone, with a step of compute and
    update (MG-WFBP, Eq. 4 and 5)."""
    efficiency: float
    """S(N) / N."""
    critical_path: dict[str, float] | None = None
    """Share of the critical path that each kind of task has."""
    ratios: dict[str, float] | None = None
    """Elements of each layer over those that are sent, for `lags`."""
    quantiles_us: dict[str, float] | None = None
    """Quantiles of the step, if jitter was asked for."""
    interval_us: tuple[float, float] | None = None
    """The step with all messages as fast, and as slow, as 9 of 10 measurements of a library's model allow."""
    lower_bound_us: float | None = None
    """Lower bound on steps of the strategy's class, if a solver was asked."""
    what_if: tuple[str, ...] = ()
    """Changes to the profile and its cluster, as text."""

    def to_document(self) -> dict[str, Any]:
        """Return the record of `planner simulate --json`, as plain JSON types."""
        return asdict(self) | {"what_if": list(self.what_if)}


def simulate(
    profile: Profile | str | Path,
    cluster: Cluster | str | Path | None = None,
    *,
    strategies: str | Sequence[str] = DEFAULT_STRATEGIES,
    ranks: Sequence[int] | None = None,
    what_if: WhatIf | None = None,
    critical_path: bool = False,
    solver: str = "dp",
    solver_limit: float | None = None,
) -> list[Simulation]:
    """Predict the step of each strategy on each number of ranks.

    Args:
        profile: a profile, the path of profile.json, or a name of the catalogue: `MODEL` or `MODEL@CLUSTER`.
        cluster: a cluster, the path of cluster.json, or a name; default: the one measured with the profile.
        strategies: names of `planner.decide.strategies.STRATEGIES`, such as `wfbp:layer`, `ddp:25` and `optimal`. With
            delay a step is the mean one in the steady state; with local updaters, the time of a rank's minibatch.
        ranks: numbers of ranks; default: the cluster's.
        what_if: changes to the profile and the cluster before anything is predicted.
        critical_path: also give the shares of kinds of task in the critical path.
        solver: `cpsat` looks for better schedules of `optimal` and `torus_2d`, and gives `lower_bound_us`.
        solver_limit: deterministic time that it may take for each.

    Returns:
        One record per (ranks, strategy), in the order given.

    Raises:
        InputError: a document is wrong, there is no cluster, a strategy is unknown, or ranks do not fill nodes.
    """
    strategies = as_names(strategies)
    limit = check_solver(solver, solver_limit)
    if solver != "dp" and not set(strategies) & set(SOLVABLE):
        raise InputError(
            f"--solver {solver}: found the strategies {', '.join(strategies)}, which follow fixed rules; expected "
            f"{' or '.join(SOLVABLE)} among them; leave the option out or add one"
        )
    try:
        counts = [] if ranks is None else [operator.index(count) for count in ranks]
    except TypeError:  # numbers that come from a program may be of any type
        raise InputError(f"ranks: found {ranks!r}, expected a list of integers; pass for example [4, 8]") from None
    change = what_if or WhatIf()
    loaded = change.profile(find_profile(profile))
    machines = None if cluster is None else change.cluster(find_cluster(cluster))
    results = []
    where = name_of(profile if cluster is None else cluster)
    for count in counts or (None,):
        chosen = cut_problem(make_problem(loaded, machines, count, where=where))
        for strategy in strategies:
            problem = problem_of(chosen, strategy)
            schedule = make_schedule(problem, strategy)
            solved = solve_strategy(problem, strategy, schedule, limit) if solver == "cpsat" else None
            schedule = solved.schedule if solved else schedule
            verify_on(problem, schedule, accuracy_of(strategy))
            result = _simulation(problem, schedule, strategy, change, critical_path)
            if solved:
                result = replace(result, lower_bound_us=solved.bound_us)
            results.append(result)
    return results


def _simulation(problem: Problem, schedule: Schedule, strategy: str, change: WhatIf, path: bool) -> Simulation:
    model = model_of(schedule)
    timeline = model.simulate(problem, schedule)
    notes, implied = model.assumptions(problem)
    source = [problem.cost.source]
    dtype = next((bucket.codec.dtype for bucket in schedule.buckets if isinstance(bucket.codec, Wire)), None)
    if dtype is not None and (known := encoding(problem.cost.cluster, dtype)[2]) != "measured":
        source.append(f"encoding {known} (no `encode` given)")
    if problem.basis is not None and problem.basis.basis == "scaled":
        source.append(str(problem.basis))
    if any(bucket.transport.sparse for bucket in schedule.buckets):
        if flat_is_implied(problem.cost.cluster):
            source.append("gathers follow from the all-reduce")
            implied = True
        if problem.cost.cluster.sparsify is None:
            source.append("selection free (no `sparsify` given)")
    alone_us = problem.compute_end_us + problem.update_us
    efficiency = alone_us / timeline.iteration_us if timeline.iteration_us > 0.0 else 1.0
    return Simulation(
        strategy=strategy,
        ranks=problem.ranks,
        iteration_us=timeline.iteration_us,
        exposed_us=timeline.exposed_us,
        forward_us=problem.forward_us,
        backward_us=problem.backward_us,
        update_us=timeline.update_us,
        buckets=len(schedule.buckets),
        extrapolated=problem.cost.extrapolated or implied,
        cost_source="; ".join([*source, *notes]),
        idle_us=idle_us(timeline),
        message_bytes=model.message_bytes(problem, schedule),
        speed_up=problem.ranks * efficiency,
        efficiency=efficiency,
        critical_path=model.critical_path(problem, schedule) if path else None,
        ratios=ratios(problem, schedule) if strategy.partition(":")[0] == "lags" else None,
        quantiles_us=step_quantiles(problem, schedule, change) if change.jitter else None,
        interval_us=_interval_us(problem, schedule),
        what_if=describe(change),
    )


def _interval_us(problem: Problem, schedule: Schedule) -> tuple[float, float] | None:
    cluster, within = problem.cost.cluster, problem.cost.interval
    if within is None or cluster.nccl is None:
        return None
    ends = []
    for factor in (1.0 / (1.0 + within), 1.0 + within):
        other = communication_cost(replace(cluster, nccl=scaled(cluster.nccl, factor)))
        there = Problem(profile=problem.profile, cost=other)
        ends.append(model_of(schedule).simulate(there, schedule).iteration_us)
    return ends[0], ends[1]


def idle_us(timeline: Timeline) -> dict[str, float]:
    """Return the time that each resource is idle in a step; of several steps, in a mean one."""
    steps = timeline.steps if isinstance(timeline, CycleTimeline) else 1
    resources = dict.fromkeys(["compute", *(span.resource for span in timeline.spans)])
    return {name: max(0.0, timeline.iteration_us - busy_us(timeline.on(name)) / steps) for name in resources}
