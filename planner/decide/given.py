"""`planner optimize --from-schedule`: a plan of a schedule that the user wrote or edited.

Everything is decided as without it, so that the plan has the same baselines, alternatives and notes; the schedule is a
candidate that is required.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from planner.decide.defaults import DEFAULT_PASSES
from planner.decide.pipeline import parse_passes
from planner.decide.plan_request import Request
from planner.emit.lower import lower
from planner.ir import ACCURACIES, Bucket, Mode, Schedule
from planner.model.codecs import by_codec
from planner.model.modes.delayed import Delayed
from planner.model.modes.local_updaters import LocalUpdaters
from planner.model.modes.outer_steps import OuterSteps
from planner.model.modes.sharded import not_shared_reason, owners_of
from planner.model.owned import whole_gradients
from planner.model.problem import Problem
from planner.model.schedule_text import ScheduleText, read_schedule
from planner.model.spending import spending
from planner.passes.base import Pass, Pipeline
from planner.passes.delay import Delay, unsuited
from planner.passes.joint import DEFAULT_COMPRESS, Joint
from planner.passes.local_async import LocalAsync
from planner.passes.outer import Outer
from planner.verify import VerifyError, verify_on
from runtime.errors import InputError
from runtime.plan.files import read_text


def given_request(request: Request, path: str) -> Request:
    """Return the request for a plan with the schedule in a file, as `--print-after` prints it.

    Args:
        request: the profile, the riskiest class and the interfaces allowed, and the memory limit.
        path: the file with the schedule.

    Raises:
        InputError: the schedule cannot be read, does not fit the profile, or is not allowed.
    """
    text = read_schedule(read_text(path, "a schedule as --print-after prints it"), path)
    _check(request, text, path)
    schedule = text.schedule
    needed = lower(request.problem, schedule).interfaces
    if missing := [name for name in needed if name not in request.interfaces]:
        raise InputError(
            f"{path}: found a schedule that needs {' and '.join(missing)}, expected one that is drop-in; add "
            f"--allow {','.join(missing)}"
        )
    usual = parse_passes(DEFAULT_PASSES)
    return replace(
        request,
        accuracy=schedule.accuracy,
        allow=needed,
        passes=Pipeline([*usual, *_lossy(schedule)]),
        given=schedule,
    )


def _lossy(schedule: Schedule) -> list[Pass]:
    """Return the lossy passes that decide what a plan reports of other choices of its class."""
    if schedule.accuracy == "bounded":
        return [Joint(compress=_compress(schedule))]
    passes: dict[type[Mode], Pass] = {LocalUpdaters: LocalAsync(), OuterSteps: Outer(), Delayed: Delay()}
    return [passes[type(schedule.mode)]] if schedule.accuracy == "relaxed" else []


def _compress(schedule: Schedule) -> str:
    """Return what `joint` has to look at, so that the plan's frontier has what the schedule does; empty: the usual."""
    names = sorted(codec.option for codec, _ in by_codec(schedule.buckets))
    return "" if names == [DEFAULT_COMPRESS] else "|".join(names)


def _check(request: Request, text: ScheduleText, path: str) -> None:
    """Raise InputError where the schedule is riskier than allowed, cannot be verified, or has no price."""
    problem, schedule, accuracy = request.problem, text.schedule, request.accuracy
    if ACCURACIES.index(schedule.accuracy) > ACCURACIES.index(accuracy):
        raise InputError(
            f"--accuracy {accuracy}: found a schedule in {path} that is {schedule.accuracy}; add --accuracy "
            f"{schedule.accuracy}, or change the schedule"
        )
    try:
        verify_on(problem, schedule, accuracy)
    except VerifyError as error:
        named = re.findall(r"\bbucket ([0-9]+)", str(error))  # the verifier names buckets by position
        where = f"{path}: line {text.lines[int(named[-1])]}" if named else path
        raise InputError(f"{where}: {error}; correct it") from None
    if schedule.mode.shares_update and (reason := not_shared_reason(problem)) is not None:
        raise InputError(f"{path}: found the mode {schedule.mode}, but {reason}; leave that line out")
    if schedule.mode.shares_update and (reason := _owners_problem(problem, owners_of(schedule))) is not None:
        raise InputError(f"{path}: found the mode {schedule.mode}, but {reason}; correct its owners")
    any_optimizer = schedule.mode.accuracy != "relaxed" or isinstance(schedule.mode, OuterSteps)
    if not any_optimizer and (reason := unsuited(problem, f"{schedule.mode} needs")):
        raise InputError(f"{path}: {reason}; leave that line out")
    for line, bucket in zip(text.lines, schedule.buckets, strict=True):
        if not _has_price(problem, bucket):
            raise InputError(f"{path}: line {line}: found {bucket}, which nothing sends so; correct it")


def _owners_problem(problem: Problem, owners: Sequence[int] | None) -> str | None:
    """Return why these cannot be the owners of parameters that the optimizer updates whole; None where they can."""
    odd = next((rank for rank in owners or () if rank >= problem.ranks), None)
    if odd is not None:
        return f"there is no rank {odd}, for there are {problem.ranks} ranks"
    bare = next((one for one in whole_gradients(problem) if owners is None or owners[one] < 0), None)
    return None if bare is None else f"gradient {bare} has no owner, whose parameter the optimizer updates whole"


def _has_price(problem: Problem, bucket: Bucket) -> bool:
    """Return whether the cost model knows how a bucket is sent."""
    if bucket.whole:
        return bucket.transport.exact
    try:
        spending(problem, bucket)
    except (KeyError, AssertionError):
        return False
    return True
