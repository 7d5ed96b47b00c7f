"""Whole steps of several plans by turns on this rank, from a profile that is taken first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.compare.contestants import BARE, Contestant
from planner.compare.measure import WARM_UP_STEPS, Contest, Measured, Record
from planner.ir import Schedule
from planner.lower import lower
from planner.problem import Problem, make_problem
from planner.profile.document import Profile
from planner.profile.step import TIMEOUT_S
from planner.progress import Silent
from planner.training import build, profile_rank
from runtime.world import World


@dataclass(frozen=True)
class RankSteps:
    """What one rank saw."""

    profile: Profile
    """Taken before the steps."""
    measured: Measured
    """The bare loop's records, then those of the plans in their order."""


def measure_rank(
    job: str,
    schedules: Callable[[Problem], Mapping[str, Schedule]],
    rounds: int,
    steps: int,
    warm_up_steps: Callable[[Problem], int] = lambda problem: WARM_UP_STEPS,
    device: str = "cpu",
) -> RankSteps:
    """Every rank calls it: profiles, and trains with no exchange and with each plan in blocks of `steps` by turns.

    `schedules` makes the plans, named, from the problem that the profile poses.
    """
    profile = profile_rank(job, device, show_progress=False)
    problem = make_problem(profile)
    plans = {name: lower(problem, schedule) for name, schedule in schedules(problem).items()}
    bare = Contestant(name=BARE, kind="bare")
    contestants = [bare, *(Contestant(name=name, kind="plan", plan=plan) for name, plan in plans.items())]
    world = World.join(None, TIMEOUT_S)
    try:
        contest = Contest(build(job, device), world, None, warm_up_steps(problem))
        contest.warm_up(bare)
        measured = contest.measure([Record(one) for one in contestants], rounds, steps, Silent())
    finally:
        world.leave()
    return RankSteps(profile, measured)
