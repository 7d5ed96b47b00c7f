"""`planner optimize --from-schedule`: a plan of a schedule that the user wrote or edited.

Everything is decided as without it, so that the plan has the same baselines, alternatives and notes; then the schedule
takes the place of what was decided.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from planner.decide.defaults import DEFAULT_PASSES
from planner.decide.optimize import optimize
from planner.decide.pipeline import parse_passes
from planner.decide.sharded_step import check_allow
from planner.documents.catalog import find_cluster, find_profile, name_of
from planner.documents.profile import Cluster, Profile
from planner.emit.lower import lower
from planner.ir import ACCURACIES, Bucket, Schedule
from planner.model.codecs import by_codec
from planner.model.modes.late_gather import LateGather
from planner.model.modes.local_updaters import LocalUpdaters, batch_prep_us
from planner.model.modes.sharded import not_shared_reason
from planner.model.problem import Problem, make_problem
from planner.model.schedule_text import ScheduleText, read_schedule
from planner.model.spending import spending
from planner.passes.base import Bound, Pass, Pipeline, Result
from planner.passes.delay import Delay, unsuited
from planner.passes.joint import DEFAULT_COMPRESS, Joint
from planner.passes.late_gather import late_gathers
from planner.passes.local_async import LocalAsync
from planner.passes.shard_updates import shared_bound
from planner.verify import VerifyError, verify
from runtime.errors import InputError
from runtime.plan import Accuracy, Plan
from runtime.plan.files import read_text


def optimize_given(
    profile: Profile | str | Path,
    cluster: Cluster | str | Path | None,
    path: str,
    *,
    accuracy: Accuracy = "exact",
    allow: str | Sequence[str] = (),
    max_memory_mib: float | None = None,
) -> Plan:
    """Return the plan of the schedule in a file, as `--print-after` prints it.

    Args:
        profile: as of `optimize`, and so are `cluster` and `max_memory_mib`.
        path: the file with the schedule.
        accuracy: the riskiest class of schedule allowed.
        allow: interfaces besides drop-in that the schedule may need.

    Raises:
        InputError: as `optimize` does; or the schedule cannot be read, does not fit the profile, or is not allowed.
    """
    if accuracy not in ACCURACIES:
        raise InputError(f"--accuracy: found {accuracy!r}, expected one of: {', '.join(ACCURACIES)}")
    text = read_schedule(read_text(path, "a schedule as --print-after prints it"), path)
    machines = None if cluster is None else find_cluster(cluster)
    problem = make_problem(find_profile(profile), machines, where=name_of(profile if cluster is None else cluster))
    _check(problem, text, path, accuracy)
    schedule = text.schedule
    needed = lower(problem, schedule).interfaces
    if missing := [name for name in needed if name not in check_allow(allow)]:
        raise InputError(
            f"{path}: found a schedule that needs {' and '.join(missing)}, expected one that is drop-in; add "
            f"--allow {','.join(missing)}"
        )
    return optimize(
        profile,
        cluster,
        accuracy=schedule.accuracy,
        allow=needed,
        passes=Pipeline(_passes(schedule)),
        max_memory_mib=max_memory_mib,
    )


def _passes(schedule: Schedule) -> list[Pass]:
    """Return what decides as usual, and then the schedule in its place."""
    usual = list(parse_passes(DEFAULT_PASSES))
    if schedule.accuracy == "exact":
        return [*usual, Given(schedule=schedule)]
    if schedule.accuracy == "bounded":
        return [*usual, Joint(compress=_compress(schedule)), GivenBounded(schedule=schedule)]
    updaters = isinstance(schedule.mode, LocalUpdaters)
    return [*usual, GivenRelaxed(schedule=schedule, decided=LocalAsync() if updaters else Delay())]


def _compress(schedule: Schedule) -> str:
    """Return what `joint` has to look at, so that the plan's frontier has what the schedule does; empty: the usual."""
    names = sorted(codec.option for codec, _ in by_codec(schedule.buckets))
    return "" if names == [DEFAULT_COMPRESS] else "|".join(names)


def _check(problem: Problem, text: ScheduleText, path: str, accuracy: str) -> None:
    """Raise InputError where the schedule is riskier than allowed, cannot be verified, or has no price."""
    schedule = text.schedule
    if ACCURACIES.index(schedule.accuracy) > ACCURACIES.index(accuracy):
        raise InputError(
            f"--accuracy {accuracy}: found a schedule in {path} that is {schedule.accuracy}; add --accuracy "
            f"{schedule.accuracy}, or change the schedule"
        )
    norms = len(problem.norm_layers), problem.ranks
    try:
        verify(schedule, problem.dtype_ids.tolist(), accuracy=accuracy, elements=problem.layer_elements, norms=norms)
    except VerifyError as error:
        named = re.findall(r"\bbucket ([0-9]+)", str(error))  # the verifier names buckets by position
        where = f"{path}: line {text.lines[int(named[-1])]}" if named else path
        raise InputError(f"{where}: {error}; correct it") from None
    if schedule.mode.shares_update and (reason := not_shared_reason(problem)) is not None:
        raise InputError(f"{path}: found the mode {schedule.mode}, but {reason}; leave that line out")
    if schedule.mode.accuracy == "relaxed" and (reason := unsuited(problem, f"{schedule.mode} needs")):
        raise InputError(f"{path}: {reason}; leave that line out")
    for line, bucket in zip(text.lines, schedule.buckets, strict=True):
        if not _has_price(problem, bucket):
            raise InputError(f"{path}: line {line}: found {bucket}, which nothing sends so; correct it")


def _has_price(problem: Problem, bucket: Bucket) -> bool:
    """Return whether the cost model knows how a bucket is sent."""
    if bucket.whole:
        return bucket.transport.exact
    try:
        spending(problem, bucket)
    except (KeyError, AssertionError):
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Given(Pass):
    """A schedule that takes the place of what other passes decide. In no registry: no text names a schedule."""

    name: ClassVar[str] = "given"
    decides_update: ClassVar[bool] = True
    required: ClassVar[bool] = True

    schedule: Schedule

    def apply(self, schedule: Schedule, problem: Problem) -> Result:
        """Return the schedule that was given, with the bound of its class."""
        bound: Bound | None = None
        if isinstance(self.schedule.mode, LateGather):
            bound = late_gathers(problem).bound
        elif self.schedule.mode.shares_update:
            bound = shared_bound(problem)
        return Result(schedule=self.schedule, bound=bound)


@dataclass(frozen=True, kw_only=True)
class GivenBounded(Given):
    """A bounded schedule."""

    accuracy: ClassVar[Accuracy] = "bounded"


@dataclass(frozen=True, kw_only=True)
class GivenRelaxed(Given):
    """A relaxed schedule."""

    accuracy: ClassVar[Accuracy] = "relaxed"
    what: ClassVar[str] = "the given schedule"

    decided: Pass
    """The pass that decides in its mode, for what a plan reports of the other choices."""

    def apply(self, schedule: Schedule, problem: Problem) -> Result:
        """Return the schedule that was given; if it is also what the pass decides, with its notes and bound."""
        found = self.decided.apply(schedule, problem)
        if found.schedule == self.schedule:
            return found
        prep_us = batch_prep_us(problem) if isinstance(self.schedule.mode, LocalUpdaters) else 0.0
        return Result(schedule=self.schedule, plan_fields=found.plan_fields, batch_prep_us=prep_us)
