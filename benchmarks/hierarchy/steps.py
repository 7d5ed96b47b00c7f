"""Whole steps on emulated hosts: flat, torus and HiTopKComm beside what was predicted of them, by turns in one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.compare.contestants import BARE, Contestant
from planner.compare.measure import Contest, Record
from planner.compare.report import values_by_name
from planner.compare.statistics import median_interval
from planner.ir import Schedule
from planner.lower import lower, predict
from planner.passes.joint import Joint
from planner.passes.merge import Merge
from planner.passes.topology import Topology
from planner.problem import Problem, make_problem
from planner.profile.step import TIMEOUT_S
from planner.progress import Silent
from planner.strategies import make_schedule
from planner.strategies.optimal import best_baseline
from planner.training import build, profile_rank
from runtime.plan import Plan
from runtime.world import World

NAMED = ("ddp", "torus_2d", "slgs:0.01", "hitopk:0.01")
WARM_UPS = 1


@dataclass(frozen=True)
class Seen:
    """One plan."""

    name: str
    form: str
    predicted_us: float
    measured_us: float
    ci95_us: tuple[float, float]


def schedules(problem: Problem) -> dict[str, Schedule]:
    """The rivals, then what planner chooses: flat, of all exact plans, and with up to 1 % of any layer's elements."""
    made = {name: make_schedule(problem, name) for name in NAMED}
    made["merge"] = Merge().apply(best_baseline(problem), problem)
    made["topology"] = Topology().apply(made["merge"], problem)
    made["joint"] = Joint(max_ratio=100.0, protect="none").apply(made["topology"], problem)
    return made


def run_rank(job: str, rounds: int) -> list[Seen]:
    """Every rank calls it; rank 0's figures are of all ranks."""
    profile = profile_rank(job, "cpu", show_progress=False)
    problem = make_problem(profile)
    made = schedules(problem)
    plans: dict[str, Plan] = {name: lower(problem, schedule) for name, schedule in made.items()}
    world = World.join(None, TIMEOUT_S)
    contest = Contest(build(job, "cpu"), world, None, WARM_UPS)
    bare = Contestant(name=BARE, kind="bare")
    contest.warm_up(bare)
    contestants = [bare, *(Contestant(name=name, kind="plan", plan=plan) for name, plan in plans.items())]
    measured = contest.measure([Record(one) for one in contestants], rounds, 1, Silent())
    values = values_by_name(world.gather(measured, "comparing steps"))
    world.leave()
    return [_seen(name, problem, made.get(name), values[name]) for name in values]


def _seen(name: str, problem: Problem, schedule: Schedule | None, values_us: Sequence[float]) -> Seen:
    interval = median_interval(np.asarray(values_us))
    compute_us = problem.compute_end_us + problem.update_us
    forms = [f"{bucket.collective}/{bucket.algorithm}" for bucket in schedule.buckets] if schedule else []
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
