"""Whole steps of several plans by turns on this rank, from a profile that is taken first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.comparison.measure import WARM_UP_STEPS, Measured, VariantRunner
from planner.comparison.trained import TrainedJob
from planner.comparison.variants import NO_COMMUNICATION, BucketVariant, Rounds
from planner.documents.profile import Profile
from planner.emit.lower import lower, predict
from planner.ir import Schedule
from planner.jobs.on_rank import profile_rank
from planner.jobs.training import build
from planner.model.problem import Problem, make_problem
from planner.profile.bench import Bench
from planner.profile.request import Request
from planner.profile.step import TIMEOUT_S
from runtime.comm.world import World
from runtime.plan import Accuracy

LONG_STEP_US = 500_000.0
"""Of longer steps a block has one, after one to warm up: they are many milliseconds of traffic that varies little."""


@dataclass(frozen=True)
class RankSteps:
    """What one rank saw."""

    profile: Profile
    """Taken before the steps."""
    measured: Measured
    """The no-communication baseline's records, then those of the plans in their order."""


def measure_rank(
    job: str,
    schedules: Callable[[Problem], Mapping[str, Schedule]],
    rounds: int,
    steps: int,
    device: str = "cpu",
    accuracy: Accuracy = "exact",
) -> RankSteps:
    """Every rank calls it: profiles, and trains with no exchange and with each plan in blocks of `steps` by turns.

    `schedules` makes the plans, named, from the problem that the profile poses; `accuracy` is the riskiest class of
    them. Where steps are long, blocks have one.
    """
    profile = profile_rank(job, device, show_progress=False, request=Request(accuracy=accuracy))
    problem = make_problem(profile)
    plans = {name: lower(problem, schedule) for name, schedule in schedules(problem).items()}
    bare = BucketVariant(name=NO_COMMUNICATION, kind="no_communication")
    variants = [bare, *(BucketVariant(name=name, kind="plan", plan=plan) for name, plan in plans.items())]
    long = predict(problem, Schedule.from_boundaries([problem.count])).iteration_us > LONG_STEP_US
    built = build(job, device)
    world = World.join(None, TIMEOUT_S)
    try:
        bench = Bench(world, built.device)
        runner = VariantRunner(TrainedJob(built), bench, None, 1 if long else WARM_UP_STEPS)
        runner.warm_up(bare)
        measured = runner.measure(variants, Rounds(count=rounds, steps=1 if long else steps))
    finally:
        world.leave()
    return RankSteps(profile, measured)
