"""Delayed synchronization (SSD-SGD, arXiv 2012.05396): buckets are pushed in every step, new weights pulled after every
k-th. `planner.model.delay` finds the steady state.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from planner.documents.text import format_significant, ms, pluralize
from planner.ir import Mode, Schedule
from planner.model.codecs import codec_of, compression
from planner.model.delay import CycleTimeline, ops_of, simulate_cycle, steady_state
from planner.model.delay_load import StepWork
from planner.model.engine import run
from planner.model.problem import Problem
from planner.model.reasons import PlanWords, difference, merging, push_and_pull
from runtime.errors import InputError
from runtime.plan import Accuracy, DelaySpec, Plan, combinations
from runtime.plan.predicted import DelayPoint

WARMUP_STEPS = 500
"""Synchronous steps before delay, rounded up to a multiple of k."""

NEAR = 0.02
"""Share of the best mean step that a smaller k may cost."""

CASES = {1: "pulls are late", 2: "the network is never idle", 3: "nothing is exposed"}
"""The cases of Eq. 4."""


@dataclass(frozen=True)
class Delayed(Mode):
    """New weights come after every k-th step; in between each rank updates weights of its own.

    >>> str(Delayed(4)), str(Delayed(4, servers=2))
    ('delay k=4', 'delay k=4 servers=2')
    """

    name: ClassVar[str] = combinations.DELAY
    accuracy: ClassVar[Accuracy] = "relaxed"

    k: int
    servers: int = 0
    """Number of workers that own weights, in predictions; 0: all, as in plans."""

    def __str__(self) -> str:
        return f"delay k={self.k}" + (f" servers={self.servers}" if self.servers else "")

    @classmethod
    def parse(cls, line: str) -> Mode | None:
        match = re.fullmatch(r"delay k=([1-9][0-9]{0,8})(?: servers=([1-9][0-9]{0,8}))?", line)
        return None if match is None else cls(int(match[1]), int(match[2] or 0))


def delay_of(schedule: Schedule) -> int:
    """Return k. Raises ValueError for a schedule of another mode."""
    if not isinstance(schedule.mode, Delayed):
        raise ValueError("the schedule has no delay")
    return schedule.mode.k


def defect(schedule: Schedule, gradients: int) -> str | None:
    """Return what is wrong with a delay of less than a step."""
    k = delay_of(schedule)
    return None if k >= 1 else f"a delay of {k} steps is none: k has to be at least 1"


def _work(problem: Problem, schedule: Schedule, local_update_us: float | None = None) -> StepWork:
    servers = schedule.mode.servers if isinstance(schedule.mode, Delayed) else 0
    return StepWork.of(problem, schedule, local_update_us, servers)


def step_us(problem: Problem, schedule: Schedule, local_update_us: float | None = None) -> float:
    """Return the mean step; `local_update_us` replaces the cluster's."""
    return steady_state(_work(problem, schedule, local_update_us), delay_of(schedule)).mean_us


def simulate(problem: Problem, schedule: Schedule) -> CycleTimeline:
    return simulate_cycle(problem, _work(problem, schedule), delay_of(schedule))


def critical_path(problem: Problem, schedule: Schedule) -> dict[str, float]:
    """Return the shares of kinds of op in three cycles, the first of which begins with an idle network."""
    k = delay_of(schedule)
    return run(ops_of(_work(problem, schedule), k, 3 * k)).shares()


def message_bytes(problem: Problem, schedule: Schedule) -> dict[str, float]:
    """Return bytes pushed in every step, pulled every k-th, and averaged and spread inside nodes that are workers."""
    k, inside, total = delay_of(schedule), problem.ranks_per_worker, dict[str, float]()
    sizes = problem.bucket_bytes([bucket.gradients for bucket in schedule.buckets])
    for bucket, size_bytes in zip(schedule.buckets, sizes, strict=True):
        pushed = 1.0 if bucket.whole else codec_of(bucket).pushed_bytes(problem, bucket) / max(1.0, size_bytes)
        between = (pushed + 1.0 / k) / inside
        shares = {"network": between} if inside == 1 else {"inter": between, "intra": 2.0 + 1.0 / k}
        for network, share in shares.items():
            total[network] = total.get(network, 0.0) + share * size_bytes
    return total


def assumptions(problem: Problem) -> tuple[list[str], bool]:
    """Return sources of the costs of pushes and pulls with what was not measured, and whether costs are implied."""
    notes = [f"push: {problem.push.source}, pull: {problem.pull.source}"]
    if problem.cost.cluster.local_update is None:
        notes.append("local update free (no `local_update` given)")
    elif problem.cost.cluster.push_pack is None:
        notes.append("packing and taking free (no `push_pack` and `pull_take` given)")
    return notes, problem.push.implied or problem.pull.implied


def plan_fields(problem: Problem, schedule: Schedule) -> dict[str, Any]:
    """Return the plan's fields. Raises InputError: only some workers are servers, which is predicted only."""
    if isinstance(schedule.mode, Delayed) and schedule.mode.servers:
        raise InputError(
            f"found the schedule {schedule.mode}, expected servers on all workers, as plans have them: leave it out"
        )
    return {"delay": delay_spec(delay_of(schedule))}


def delay_spec(k: int) -> DelaySpec:
    """SSD-SGD; its synchronous steps are a multiple of k, as the paper asks.

    Local steps are about as long as the paper's (α + β times `local_lr_scale` learning rates), but go more the way
    of all workers and less in that of one batch: that trained better models wherever the two differed
    (`benchmarks.delay`).
    """
    return DelaySpec(steps=k, warmup_steps=-(-WARMUP_STEPS // k) * k, alpha=0.75, beta=2.0)


def describe(plan: Plan) -> PlanWords | None:
    """Return the description of a plan with delay: how often new weights arrive."""
    spec = plan.delay
    if spec is None:
        return None
    every = "step" if spec.steps == 1 else f"{spec.steps} steps"
    short, first = f"delay k = {spec.steps}", pluralize(spec.warmup_steps, "synchronous step")
    return PlanWords(
        short=short,
        line=f"{short}: new weights after every {every}, {first} first; the optimizer has to be torch.optim.SGD",
        paragraph=f"With delay: gradients are pushed in every step, and new weights come after every {every}. That is "
        f"the mean step; the time line shows a whole cycle, from a step that new weights follow.",
    )


def explain(problem: Problem, schedule: Schedule, timeline: object) -> list[str]:
    """Return what merging or selecting saves in every push, and the times of each bucket's push and pull."""
    load = _work(problem, schedule)
    alone_us = problem.bucket_cost_us([(gradient,) for gradient in range(problem.count)], problem.push.curve)

    reasons = []
    for bucket, push_us, pull_us in zip(schedule.buckets, load.push_us, load.pull_us, strict=True):
        push, pull = push_and_pull(push_us, pull_us, delay_of(schedule))
        if bucket.whole:
            reasons.append(f"{merging(bucket, alone_us, push_us)}; {push}, {pull}")
        else:
            elements = problem.elements(bucket)
            whole_us = problem.bucket_cost_us([bucket.gradients], problem.push.curve)[0]
            saved = difference(whole_us - push_us)
            reasons.append(
                f"{codec_of(bucket).sent_text()} of {elements:,} elements: {push}, {saved} than whole; {pull}"
            )
    return reasons


def notes(problem: Problem, schedule: Schedule, points: Sequence[DelayPoint]) -> list[str]:
    """Return what readers of a plan with this schedule should know; `points`: what each k would give."""
    k = delay_of(schedule)
    times = ", ".join(
        f"{point.steps}: {ms(point.iteration_us)} ({format_significant(point.closed_form_us / 1000)} by "
        f"Eq. 4, case {point.case}: {CASES[point.case]})"
        for point in points
    )
    found = [
        f"delay: gradients are pushed in every step, new weights come after every {f'{k} steps' if k != 1 else 'step'} "
        f"and are used one step later; in between ranks hold weights of their own",
        f"mean step by k, simulated: {times}; k = {k} is the smallest within {NEAR:.0%} of the best",
        f"the optimizer has to be torch.optim.SGD; the first {delay_spec(k).warmup_steps} steps are synchronous",
        f"reduce-scatter: {problem.push.source}; all-gather: {problem.pull.source}",
    ]
    if problem.ranks_per_worker > 1:
        found.append(
            f"the worker is the node: its {problem.ranks_per_worker} ranks average their gradients in every step and "
            f"have the same weights"
        )
    lossy = [bucket for bucket in schedule.buckets if not bucket.whole]
    if lossy:
        ratio, _ = compression(problem, lossy)
        found.append(
            f"pushes of {len(lossy)} of {len(schedule.buckets)} buckets carry their largest elements, one in "
            f"{ratio:.0f} at the least; each worker holds the rest back and pushes it later; the synchronous steps and "
            f"the pulls carry everything"
        )
    if problem.cost.cluster.local_update is None:
        found.append(
            "the local update is taken as free, for the cluster has no `local_update` cost; delay had to pay with "
            "one as long as the optimizer's update: time it on that machine and add it"
        )
    timeline = simulate(problem, schedule)
    if timeline.error_us > 0.0:
        found.append(f"steps do not repeat exactly: the mean step may be off by {timeline.error_us:.3g} us")
    return found
