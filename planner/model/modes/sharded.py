"""Sharded optimizer step (ZeRO-1): what it costs, and what it takes of ranks' memory.

Parts are equal, or whole parameters with owners, as matrix optimizers need them: the rank with most of a message
decides how long it takes, and the rank with most work when the update ends.

Gradients are reduce-scattered in place of all-reduced, each rank updates its part of the weights, then weights are
all-gathered; a small message behind the last bucket says which gradients came. Nothing of that runs beside the next
forward. Costs are measured alone; where all-reduces were also measured in a queue, as steps have them, both messages
are taken to be later than alone by as much as those are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from planner.cost.curve import CostCurve
from planner.cost.halves import REDUCE_SCATTER
from planner.documents.text import mib, ms
from planner.ir import GAIN, OWNERS, Bucket, Mode, Schedule, format_owners, parse_owners
from planner.model import owned
from planner.model.engine import run
from planner.model.modes import synchronous
from planner.model.owned import Owners, loads_us
from planner.model.problem import Problem
from planner.model.reasons import PlanWords, merging, push_and_pull
from planner.model.step import Exchange, exchange_step_us, exchange_timeline
from planner.model.step_ops import step_ops
from runtime.pages import page
from runtime.plan import Plan, StepPlan, UpdatePlan, combinations
from runtime.plan.interfaces import SHARDED_STEP
from runtime.plan.timeline import Timeline

Sizes = NDArray[np.float64]

ASK = f"some lines that work with DDP then do not: {page('concepts/sharded-step')}, --allow {SHARDED_STEP}"
SMALLER = "take more ranks, or a smaller batch"


@dataclass(frozen=True)
class Sharded(Mode):
    """Buckets are reduce-scattered, each rank updates its part of the weights, then weights are gathered.

    >>> str(Sharded()), str(Sharded(owners=(0, -1, 1)))
    ('sharded', 'sharded by 0,-,1')
    """

    name: ClassVar[str] = combinations.SHARDED
    shares_update: ClassVar[bool] = True

    owners: tuple[int, ...] | None = field(default=None, kw_only=True)
    """The rank that updates each whole gradient's parameter; −1: all ranks, equal parts. None: −1 for all."""

    def __str__(self) -> str:
        return self.name if self.owners is None else f"{self.name} by {format_owners(self.owners)}"

    @classmethod
    def parse(cls, line: str) -> Mode | None:
        match = _OWNED.fullmatch(line)
        if match is not None:
            return Sharded(owners=parse_owners(match[1]))
        return Sharded() if line == str(Sharded()) else None


_OWNED = re.compile(rf"sharded by ({OWNERS})")


def owners_of(schedule: Schedule) -> tuple[int, ...] | None:
    """Return the owners of whole gradients, by gradient; None where ranks have equal parts."""
    return schedule.mode.owners if isinstance(schedule.mode, Sharded) else None


def step_us(problem: Problem, schedule: Schedule) -> float:
    return exchange_step_us(problem, schedule.buckets, exchange(problem, schedule))


def simulate(problem: Problem, schedule: Schedule) -> Timeline:
    return exchange_timeline(problem, schedule.buckets, exchange(problem, schedule))


def exchange(problem: Problem, schedule: Schedule) -> Exchange:
    """Return the messages of each bucket, during backward and after the update of parts."""
    return Exchange(
        collectives=[REDUCE_SCATTER] * len(schedule.buckets),
        costs_us=message_costs_us(problem, schedule.buckets, owners_of(schedule)),
        update_us=own_update_us(problem, owners_of(schedule)),
        gathers_us=gathers_us(problem, schedule.buckets, owners_of(schedule)),
    )


def critical_path(problem: Problem, schedule: Schedule) -> dict[str, float]:
    return run(step_ops(problem, schedule, exchange(problem, schedule))).shares()


# Both halves of an all-reduce send what it sends, and nothing of the mode can be wrong or rests on more.
message_bytes, assumptions = synchronous.message_bytes, synchronous.assumptions


def defect(schedule: Schedule, gradients: int) -> str | None:
    """Return what is wrong with the number of owners; None where all is well."""
    owners = owners_of(schedule)
    if owners is None or len(owners) == gradients:
        return None
    return f"found owners of {len(owners)} gradients, expected {gradients}"


def named_owners(problem: Problem, schedule: Schedule) -> dict[str, int] | None:
    """Return the rank that updates each whole parameter, by name; None where there are none."""
    named = zip(problem.profile.compute.gradients, owners_of(schedule) or (), strict=False)
    return {one.name: owner for one, owner in named if owner >= 0} or None


def plan_fields(problem: Problem, schedule: Schedule) -> dict[str, Any]:
    """Return the interface that scripts have to know, and the time of gathering weights."""
    owners = named_owners(problem, schedule)
    step = StepPlan(sharded=True, owners=owners, gather_us=sum(exchange(problem, schedule).gathers_us))
    return {"interface": (SHARDED_STEP,), "updates": UpdatePlan(step=step)}


def describe(plan: Plan) -> PlanWords | None:
    """Return the description of a plan: both collectives of a bucket."""
    return PlanWords(form="reduce_scatter, all_gather") if plan.sharded and not plan.gathers else None


def explain(problem: Problem, schedule: Schedule, timeline: Timeline) -> list[str]:
    """Return what merging saves in each bucket's reduce-scatter, and both halves' times."""
    owners = owners_of(schedule)
    alone_us = _pushed_us(problem, [(gradient,) for gradient in range(problem.count)], owners)
    pushes_us = _pushed_us(problem, [bucket.gradients for bucket in schedule.buckets], owners)
    pulls_us = gathers_us(problem, schedule.buckets, owners)
    return [
        f"{merging(bucket, alone_us, push)}; {', '.join(push_and_pull(push, pull))}"
        for bucket, push, pull in zip(schedule.buckets, pushes_us, pulls_us, strict=True)
    ]


def can_share(problem: Problem) -> bool:
    """Return whether the optimizer is known to be elementwise, or to need whole parameters, and there are ranks to
    shard its work.
    """
    return not_shared_reason(problem) is None


def not_shared_reason(problem: Problem) -> str | None:
    """Return why ranks cannot share the optimizer's step, and what would change that; None where they can."""
    optimizer = problem.profile.compute.optimizer
    if problem.ranks == 1:
        return "one rank alone has nobody to share the optimizer's step with"
    if optimizer is None:
        return (
            'the profile does not say what the optimizer is ("compute": {"optimizer": …}), which `planner profile` '
            "notes: profile again"
        )
    if optimizer.unit == "matrix" and optimizer.matrices is None:
        return f"the profile does not say which parameters {optimizer.name} needs whole: profile again"
    if not optimizer.elementwise and optimizer.unit != "matrix":
        return f"{optimizer.name} is not known to treat every element by itself, or every parameter"
    if optimizer.holds_all is False:
        return (
            "the optimizer does not hold all parameters that have gradients: add the others, or freeze them before "
            "profiling"
        )
    return None


def costs_known(problem: Problem) -> bool:
    """Return whether the costs of a reduce-scatter and an all-gather are known."""
    return not (problem.reduce_scatter.implied or problem.all_gather.implied)


def push_us(problem: Problem, sizes: Sizes) -> Sizes:
    """Return the time of a reduce-scatter in a step, by the size of the message."""
    return np.asarray(problem.reduce_scatter.curve(sizes) * _at_least(problem, sizes) + _late_us(problem, sizes))


def pull_us(problem: Problem, sizes: Sizes) -> Sizes:
    """Return the time of an all-gather after the update."""
    return np.asarray(problem.all_gather.curve(sizes) * _at_least(problem, sizes) + _late_us(problem, sizes))


def _at_least(problem: Problem, sizes: Sizes) -> Sizes:
    """Return factors with which both halves take at least the all-reduce's time: they send the same bytes.

    Where each was measured for itself they may seem to take less: a link that has idled lets a first burst through.
    """
    whole = _alone(problem) or problem.cost.all_reduce
    halves_us = np.asarray(problem.reduce_scatter.curve(sizes) + problem.all_gather.curve(sizes))
    factors = np.divide(whole(sizes), halves_us, out=np.ones_like(halves_us), where=halves_us > 1e-9)
    return np.maximum(1.0, factors)


def _late_us(problem: Problem, sizes: Sizes) -> Sizes:
    alone, queued = _alone(problem), (problem.cost.cluster.back_to_back or {}).get("all_reduce")
    if alone is None or queued is None:
        return np.zeros_like(sizes)
    return np.maximum(0.0, problem.cost.all_reduce(sizes) - alone(sizes))


@lru_cache(maxsize=8)
def _alone(problem: Problem) -> CostCurve | None:
    """Return the all-reduce as measured alone, as the halves are."""
    samples = (problem.cost.cluster.samples or {}).get("all_reduce")
    return None if samples is None else CostCurve.from_samples(samples)


def message_costs_us(problem: Problem, buckets: Sequence[Bucket], owners: Owners = None) -> list[float]:
    """Return each bucket's reduce-scatter time; the last includes the flags of used gradients."""
    costs_us = _pushed_us(problem, [bucket.gradients for bucket in buckets], owners)
    costs_us[-1] += flags_us(problem)
    return costs_us


def flags_us(problem: Problem) -> float:
    """Return the time of the message after the last bucket."""
    return problem.all_gather.curve.at(float(problem.ranks * problem.count))


def _pushed_us(problem: Problem, buckets: Sequence[Sequence[int]], owners: Owners = None) -> list[float]:
    return owned.costs_us(problem, buckets, owners, lambda sizes: push_us(problem, sizes))


def gathers_us(problem: Problem, buckets: Sequence[Bucket], owners: Owners = None) -> list[float]:
    """Return the time of the all-gather of each bucket's weights."""
    members = [bucket.gradients for bucket in buckets]
    return owned.costs_us(problem, members, owners, lambda sizes: pull_us(problem, sizes), gathered=True, updates=True)


def own_update_us(problem: Problem, owners: Owners = None, *, updates: bool = True) -> float:
    """Return the time of the longest rank's update; without owners, of equal parts; `updates`: see `owned.loads_us`."""
    return problem.update_us / problem.ranks if owners is None else max(loads_us(problem, owners, updates=updates))


def replicated_bytes(problem: Problem) -> int | None:
    """Return a rank's bytes of weights, gradients, state and known activations; None if the state is unknown."""
    fixed, activations = memory_parts(problem)
    return None if fixed is None else fixed + activations


def memory_parts(problem: Problem) -> tuple[int | None, int]:
    """Return a rank's bytes of weights, gradients and state (None if that is unknown), and of known activations."""
    optimizer = problem.profile.compute.optimizer
    fixed = None
    if optimizer is not None and optimizer.state_bytes is not None:
        fixed = 2 * int(problem.size_bytes.sum()) + optimizer.state_bytes
    return fixed, _activation_bytes(problem)


def sharded_bytes(problem: Problem, schedule: Schedule, ranks: int = 0) -> int | None:
    """Return the same with a step that `ranks` share, by default all: a part of the state, and a buffer of the largest
    message.
    """
    optimizer = problem.profile.compute.optimizer
    if optimizer is None or optimizer.state_bytes is None:
        return None
    members, owners = [bucket.gradients for bucket in schedule.buckets], owners_of(schedule)
    largest = max(map(sum, owned.message_sizes(problem, members, owners)))
    state_bytes = -(-optimizer.state_bytes // (ranks or problem.ranks))
    if owners is not None:
        state_bytes = math.ceil(optimizer.state_bytes * owned.largest_share(problem, owners))
    return 2 * int(problem.size_bytes.sum()) + state_bytes + int(largest) + _activation_bytes(problem)


def _activation_bytes(problem: Problem) -> int:
    estimate = problem.profile.compute.estimate
    if estimate is not None:
        return int(estimate.checkpoint_bytes if estimate.recomputed else estimate.activation_bytes)
    return int(sum(layer.activation_bytes for layer in problem.profile.layers or ()))


def memory_bytes(problem: Problem, given_mib: float = 0.0) -> int | None:
    """Return the memory of a rank, as given or else as in the profile; None where neither has it."""
    return int(given_mib * 2**20) or problem.profile.world.memory_bytes


def needs_more_memory(problem: Problem, given_mib: float = 0.0) -> bool:
    """Return whether a rank that updates all weights needs more memory than it has."""
    return _exceeds(replicated_bytes(problem), memory_bytes(problem, given_mib))


def unused_limit_reason(problem: Problem) -> str:
    """Return why a limit of memory decides nothing; empty where it may."""
    if (reason := not_shared_reason(problem)) is not None:
        return reason
    optimizer = problem.profile.compute.optimizer
    if optimizer is not None and optimizer.state_bytes is None:
        return "the profile does not say what the optimizer keeps: profile again"
    return ""


def notes(problem: Problem, step: StepPlan | None) -> list[str]:
    """Return why the step is sharded, or why not, for readers who have allowed it."""
    reason = not_shared_reason(problem)
    if reason is not None and problem.ranks > 1:
        return [f"ranks do not share the optimizer's step, as they may: {reason}"]
    if step is None or step.sharded_us is None or step.replicated_us is None:
        return [] if step is None else _not_late(step)
    memory = saved_memory(problem, step)
    if not step.sharded:
        found = [f"ranks do not share the optimizer's step, as they may: that is {_times(step)}, and has to be "
                 f"{GAIN:.0%} shorter{memory}", *_not_late(step)]  # fmt: skip
        return [*found, too_large_note(problem, step)] if _exceeds(step.replicated_bytes, step.memory_bytes) else found
    name = problem.profile.compute.optimizer.name if problem.profile.compute.optimizer else "the optimizer"
    demanded = _exceeds(step.replicated_bytes, step.memory_bytes) and _saves(step)
    found = [
        f"ranks share the step of {name} (as ZeRO-1): {'memory demands it, ' if demanded else ''}predicted "
        f"{ms(step.sharded_us)} a step, {ms(step.replicated_us)} where every rank updates all weights, of it "
        f"{ms(step.gather_us or 0.0)} to gather weights{memory}",
        *owned.notes(problem, step.owners or {}),
    ]
    if step.memory_bytes is not None and _exceeds(step.sharded_bytes, step.memory_bytes):
        found.append(f"even so a rank needs more than its {mib(step.memory_bytes)}: {_smaller(problem, step)}")
    return found + _not_late(step)


def gain_note(problem: Problem, step: StepPlan, own_us: float) -> list[str]:
    """Return what a sharded step would gain over a plan's of `own_us` if it were allowed."""
    if step.sharded_us is None:
        return []
    if _exceeds(step.replicated_bytes, step.memory_bytes):
        return [too_large_note(problem, replace(step, replicated_us=own_us))]
    if not costs_known(problem) or step.sharded_us > own_us * (1.0 - GAIN):
        return []
    memory = f", and {_memory(step)}" if _saves(step) else ""
    return [
        f"allowed to share the optimizer's step (as ZeRO-1), ranks would take {ms(step.sharded_us)} a step instead of "
        f"{ms(own_us)}{memory}; {ASK}"
    ]


def too_large_note(problem: Problem, step: StepPlan) -> str:
    """Return that a plan does not fit into a rank's memory, and whether a sharded step would."""
    has, whole, shared = step.memory_bytes or 0, step.replicated_bytes or 0, step.sharded_bytes or 0
    text = f"a rank needs {mib(whole)} for weights, gradients, the optimizer's state and known activations, more than "
    text += f"the {mib(has)} that it has"
    smaller = _smaller(problem, step)
    if not _saves(step):
        return f"{text}: {smaller}"
    if shared > has:
        return f"{text}; sharing the optimizer's step would take {mib(shared)}, too much as well: {smaller}"
    text += f"; sharing the optimizer's step (as ZeRO-1) would fit, with {mib(shared)}, and is {_times(step)}"
    return f"{text}; {ASK}"


def _smaller(problem: Problem, step: StepPlan) -> str:
    """Return what to do where a sharded step does not fit: more ranks do not help with a matrix that none can hold."""
    (fixed, activations), optimizer = memory_parts(problem), problem.profile.compute.optimizer
    whole, sizes = owned.whole_gradients(problem), problem.size_bytes.tolist()
    if not whole or fixed is None or optimizer is None or optimizer.state_bytes is None:
        return SMALLER
    largest = max(whole, key=lambda gradient: sizes[gradient])
    state = optimizer.state_bytes * sizes[largest] / sum(sizes)
    if fixed - optimizer.state_bytes + state + activations <= (step.memory_bytes or 0):
        return SMALLER
    return (
        f"one rank has all of {problem.profile.compute.gradients[largest].name} ({mib(sizes[largest])}), about "
        f"{mib(int(state))} of state, so that more ranks do not help; take a smaller batch, or a smaller matrix"
    )


def memory_demands(step: StepPlan) -> bool:
    """Return whether a rank needs more memory than it has to update all weights, and less with a sharded step."""
    shared, whole = step.sharded_bytes, step.replicated_bytes
    return _exceeds(whole, step.memory_bytes) and _exceeds(whole, shared)


def saved_memory(problem: Problem, step: StepPlan) -> str:
    """Return the end of a note: memory that sharding saves, and that its costs were not measured."""
    implied = "" if costs_known(problem) else "; reduce-scatter and all-gather were not measured: profile again"
    return (f"; {_memory(step)}" if _saves(step) else "") + implied


def _exceeds(needed_bytes: int | None, limit_bytes: int | None) -> bool:
    return needed_bytes is not None and limit_bytes is not None and needed_bytes > limit_bytes


def _saves(step: StepPlan) -> bool:
    """Return whether a sharded step needs less memory, by the digits that are printed."""
    shared, whole = step.sharded_bytes, step.replicated_bytes
    return shared is not None and whole is not None and shared < whole and mib(shared) != mib(whole)


def _memory(step: StepPlan) -> str:
    shared, whole = mib(step.sharded_bytes or 0), mib(step.replicated_bytes or 0)
    return f"{shared} for weights, gradients, state and known activations instead of {whole}"


def _times(step: StepPlan) -> str:
    shared, whole = ms(step.sharded_us or 0.0), ms(step.replicated_us or 0.0)
    return f"predicted {shared} a step, as now" if shared == whole else f"predicted {shared} a step, {whole} as now"


def _not_late(step: StepPlan) -> list[str]:
    """Return that weights are not gathered during the next forward, if they might be."""
    if step.late_us is None:
        return []
    return [
        f"weights are not gathered beside the next forward, as they may: that is predicted {ms(step.late_us)} a step, "
        f"and has to be {GAIN:.0%} shorter"
    ]
