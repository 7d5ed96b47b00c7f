"""Whole steps on emulated hosts: flat, torus and HiTopKComm beside what was predicted of them, by turns in one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.steps import measure_rank
from planner.comparison.report import values_by_name
from planner.comparison.statistics import median_interval
from planner.decide.strategies import best_baseline, make_schedule
from planner.emit.lower import predict
from planner.ir import Schedule
from planner.jobs.rank_options import RankOptions
from planner.jobs.world import on_ranks
from planner.model.problem import Problem, make_problem
from planner.passes.joint import Joint
from planner.passes.merge import Merge
from planner.passes.topology import Topology

NAMED = ("ddp", "torus_2d", "slgs:0.01", "hitopk:0.01")


@dataclass(frozen=True)
class Seen:
    """One plan."""

    name: str
    form: str
    predicted_us: float
    measured_us: float
    ci95_us: tuple[float, float]


def schedules(problem: Problem) -> dict[str, Schedule]:
    """The rivals, then what planner chooses: flat, among all exact plans, with up to 1 % of each layer's elements."""
    made = {name: make_schedule(problem, name) for name in NAMED}
    made["merge"] = Merge().apply(best_baseline(problem), problem).schedule
    made["topology"] = Topology().apply(made["merge"], problem).schedule
    made["joint"] = Joint(max_ratio=100.0, protect="none", compress="all").apply(made["topology"], problem).schedule
    return made


def on_hosts(emulate: str, job: str, rounds: int) -> list[Seen]:
    """One start of emulated hosts; figures are of all ranks."""
    ranks = on_ranks(RankOptions(None, emulate=emulate), measure_rank, job, schedules, rounds, 1, "cpu", "bounded")
    problem = make_problem(ranks[0].profile)
    made, values = schedules(problem), values_by_name([rank.measured for rank in ranks])
    return [_seen(name, problem, made.get(name), values[name]) for name in values]


def _seen(name: str, problem: Problem, schedule: Schedule | None, values_us: NDArray[np.float64]) -> Seen:
    interval = median_interval(values_us)
    compute_us = problem.compute_end_us + problem.update_us
    forms = [str(bucket.transport) for bucket in schedule.buckets] if schedule else []
    listed = ", ".join(f"{forms.count(form)} × {form}" for form in dict.fromkeys(forms))
    predicted_us = compute_us if schedule is None else predict(problem, schedule).iteration_us
    return Seen(name, listed, predicted_us, interval.value, (interval.low, interval.high))


def lines(job: str, found: Sequence[Seen]) -> Iterator[str]:
    """One row for each plan."""
    yield "| job | plan | buckets | predicted, ms | measured, ms | 95 % | error |"
    yield "| --- | --- | --- | --: | --: | --- | --: |"
    for one in found:
        low, high = (f"{value / 1e3:.0f}" for value in one.ci95_us)
        error = one.predicted_us / one.measured_us - 1.0
        yield (
            f"| {job} | {one.name} | {one.form} | {one.predicted_us / 1e3:.0f} | {one.measured_us / 1e3:.0f} "
            f"| {low} to {high} | {error:+.1%} |"
        )
