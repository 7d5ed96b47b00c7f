"""Sharded step whose weights are gathered beside the next forward (DeAR, Zhang et al., INFOCOM 2023, decouples the two
halves of the all-reduce likewise): what it costs in a steady state.

At the end of the owners' update all gathers are launched, one message at a time, each of one or several consecutive
buckets; the next forward begins at once, and each layer waits for its own weights just before it runs. In backward
buckets are reduce-scattered as in `planner.model.modes.sharded`; the owners' update follows the last of them. So the
network is idle when forward ends, which has needed all weights, and when it begins, for the update has waited for all:
a step begins as the one before it did, and its length is the sum of three parts that depend on nothing but themselves:
forward with its waits, from there to the last reduce-scatter, and the update.

Computation and gathers slow each other down as the all-reduce of as many bytes would; launching costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from planner.cost.halves import ALL_GATHER, REDUCE_SCATTER
from planner.documents.text import ms
from planner.ir import OWNERS, Bucket, Mode, Schedule, format_indices, format_owners, parse_indices, parse_owners
from planner.model import owned
from planner.model.delay import CycleTimeline, StepSpan
from planner.model.engine import COMPUTE, NETWORK, Op, Ops, Run, run
from planner.model.forward import needs
from planner.model.modes import sharded
from planner.model.problem import Problem
from planner.model.reasons import PlanWords, exposure, merging, push_and_pull
from planner.model.step import Exchange, exchange_step_us
from runtime.plan import Plan, StepPlan, UpdatePlan
from runtime.plan.interfaces import LATE_GATHER
from runtime.plan.timeline import Timeline

Groups = tuple[tuple[int, ...], ...]
"""Buckets that are gathered together, in launch order."""

SHOWN = 2
"""Steps that a timeline shows: what is gathered for the second belongs to the first."""


@dataclass(frozen=True)
class LateGather(sharded.Sharded):
    """Sharded step whose weights are gathered during the next forward: in groups of buckets, in launch order, or
    (None) each bucket by itself, in the reverse of the schedule's order.

    >>> str(LateGather(((3, 2), (1,), (0,)))), str(LateGather(owners=(0, -1)))
    ('late_gather 2-3;1;0', 'late_gather by 0,-')
    """

    gathers: Groups | None = None

    def __str__(self) -> str:
        groups = [format_indices(sorted(group)) for group in self.gathers or ()]
        by = () if self.owners is None else ("by", format_owners(self.owners))
        return " ".join(["late_gather", *([";".join(groups)] if groups else []), *by])

    @classmethod
    def parse(cls, line: str) -> Mode | None:
        match = _LINE.fullmatch(line)
        if match is None:
            return None
        owners = parse_owners(match[2]) if match[2] else None
        if match[1] is None:
            return cls(owners=owners)
        return cls(tuple(parse_indices(group)[::-1] for group in match[1].split(";")), owners=owners)

    def fitted(self, buckets: int) -> Mode:
        """Return the same mode for a schedule of this number of buckets."""
        fits = self.gathers is None or sum(map(len, self.gathers)) == buckets
        return self if fits else replace(self, gathers=None)

    def groups(self, buckets: int) -> Groups:
        """Return the groups in launch order."""
        return self.gathers or tuple((bucket,) for bucket in reversed(range(buckets)))


_LINE = re.compile(rf"late_gather(?: ([0-9,;-]+))?(?: by ({OWNERS}))?")


def defect(schedule: Schedule, gradients: int) -> str | None:
    """Groups that leave out a bucket, have one twice, or have some that do not follow one another."""
    if (odd_owners := sharded.defect(schedule, gradients)) is not None:
        return odd_owners
    count = len(schedule.buckets)
    groups = _mode(schedule).groups(count)
    if sorted(bucket for group in groups for bucket in group) != list(range(count)):
        return f"found the gathers {groups}, expected each of {count} buckets once"
    gaps = (
        (at, sorted(group)) for at, group in enumerate(groups) if not group or max(group) - min(group) >= len(group)
    )
    at, odd = next(gaps, (0, None))
    if odd is None:
        return None
    return f"gather {at}: found buckets {format_indices(odd) or 'none'}, expected one or several without a gap"


def _mode(schedule: Schedule) -> LateGather:
    if not isinstance(schedule.mode, LateGather):
        raise ValueError("the schedule gathers no weights beside forward")
    return schedule.mode


class Gather(NamedTuple):
    """One all-gather beside forward."""

    buckets: tuple[int, ...]
    need_us: float
    """Progress of forward at which it is needed, in uncontended time."""
    cost_us: float
    """Duration on an idle machine."""
    factors: tuple[float, float]
    """(compute, network) while it and forward are both under way."""


def gathers_of(problem: Problem, schedule: Schedule) -> list[Gather]:
    """Return the gathers of a schedule in launch order."""
    groups = _mode(schedule).groups(len(schedule.buckets))
    members = [_members(schedule, group) for group in groups]
    pull = partial(sharded.pull_us, problem)
    costs_us = owned.costs_us(problem, members, sharded.owners_of(schedule), pull, gathered=True)
    need_us = needs(problem).need_us
    needed_us = [float(need_us[list(gradients)].min()) for gradients in members]
    return [Gather(*of) for of in zip(groups, needed_us, costs_us, problem.bucket_factors(members), strict=True)]


def _members(schedule: Schedule, group: Sequence[int]) -> list[int]:
    """Return the gradients of a group of buckets in readiness order."""
    return sorted(gradient for bucket in group for gradient in schedule.buckets[bucket].gradients)


def by_need(problem: Problem, schedule: Schedule) -> Schedule:
    """Return the schedule with gathers launched in the order of forward's needs: no order makes it wait less."""
    gathers = sorted(gathers_of(problem, schedule), key=lambda gather: (gather.need_us, -max(gather.buckets)))
    groups = tuple(gather.buckets for gather in gathers)
    alone = LateGather().groups(len(schedule.buckets))
    return replace(schedule, mode=replace(_mode(schedule), gathers=None if groups == alone else groups))


def of_stops(buckets: Sequence[int], groups: Sequence[int]) -> Schedule:
    """Buckets and groups of gathers that stop there, the latter in the reverse of readiness order."""
    made, start, ends = [], 0, set(groups)
    for index, stop in enumerate(buckets):
        if stop in ends:
            made.append(tuple(reversed(range(start, index + 1))))
            start = index + 1
    launched = tuple(reversed(made))
    alone = len(launched) == len(buckets)
    return replace(Schedule.from_boundaries(buckets), mode=LateGather(None if alone else launched))


def group_stops(schedule: Schedule) -> tuple[int, ...]:
    """Return one past the last gradient of each group."""
    groups = _mode(schedule).groups(len(schedule.buckets))
    return tuple(sorted(schedule.buckets[max(group)].gradients[-1] + 1 for group in groups))


def step_us(problem: Problem, schedule: Schedule) -> float:
    waited_us = forward_end_us(problem.forward_us, gathers_of(problem, schedule)) - problem.forward_us
    return waited_us + exchange_step_us(problem, schedule.buckets, _exchange(problem, schedule))


def _exchange(problem: Problem, schedule: Schedule) -> Exchange:
    return Exchange(
        collectives=[REDUCE_SCATTER] * len(schedule.buckets),
        costs_us=sharded.message_costs_us(problem, schedule.buckets, sharded.owners_of(schedule)),
        update_us=sharded.own_update_us(problem, sharded.owners_of(schedule), updates=False),
    )


def forward_end_us(forward_us: float, gathers: Sequence[Gather]) -> float:
    """Return the end of a forward that waits for weights, the first of which are sent when it begins."""
    time_us = progress_us = 0.0
    # Forward gets as far as the first layer that needs what is on its way, or has not been sent.
    stops_us = [gather.need_us for gather in gathers]
    for index in reversed(range(len(stops_us) - 1)):
        stops_us[index] = min(stops_us[index], stops_us[index + 1])
    for gather, stop_us in zip(gathers, stops_us, strict=True):
        compute, network = gather.factors
        shared_us = min(max(0.0, stop_us - progress_us) * compute, gather.cost_us * network)
        progress_us += shared_us / compute
        time_us += shared_us + max(0.0, gather.cost_us - shared_us / network)
    return time_us + forward_us - progress_us


def ops_of(problem: Problem, schedule: Schedule, steps: int) -> Ops:
    """Return the ops of steps, the first of which follows one that ended as they do."""
    gathers, exchange = gathers_of(problem, schedule), _exchange(problem, schedule)
    members = [bucket.gradients for bucket in schedule.buckets]
    ready_us = [problem.ready_list_us[max(gradients)] for gradients in members]
    factors = problem.bucket_factors(members)
    in_order = sorted(range(len(gathers)), key=lambda index: gathers[index].need_us)
    ops, updated = Ops(), tuple[int, ...]()
    for step in range(steps):
        sent = [
            ops.add(Op(NETWORK, gather.cost_us, updated, ALL_GATHER, step, min(gather.buckets), gather.factors))
            for gather in gathers
        ]
        done_us, arrived = 0.0, tuple[int, ...]()
        for index in in_order:
            ops.add(Op(COMPUTE, gathers[index].need_us - done_us, arrived, "forward", step))
            done_us, arrived = gathers[index].need_us, (sent[index],)
        ops.add(Op(COMPUTE, problem.forward_us - done_us, arrived, "forward", step))
        done_us, made = problem.forward_us, [0] * len(members)
        for bucket in sorted(range(len(members)), key=ready_us.__getitem__):
            made[bucket] = ops.add(Op(COMPUTE, ready_us[bucket] - done_us, (), "backward", step))
            done_us = ready_us[bucket]
        ops.add(Op(COMPUTE, problem.compute_end_us - done_us, (), "backward", step))
        for bucket, cost_us in enumerate(exchange.costs_us):
            last = ops.add(Op(NETWORK, cost_us, (made[bucket],), REDUCE_SCATTER, step, bucket, factors[bucket]))
        updated = (ops.add(Op(COMPUTE, exchange.update_us, (last,), "update", step)),)
    return ops


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSpan(StepSpan):
    """A task of one of several steps."""

    buckets: tuple[int, ...] = ()
    """Buckets of a gather of several."""
    critical: bool = False
    """Whether the length of steps comes from it."""


def simulate(problem: Problem, schedule: Schedule) -> CycleTimeline:
    """Return two steps, from the start of a forward; gathers belong to the step whose weights they bring."""
    ran = run(ops_of(problem, schedule, SHOWN))
    spans = [*_computed(ran), *_sent(problem, schedule, ran)]
    return CycleTimeline(
        spans=tuple(sorted(spans, key=lambda span: (span.start_us, span.end_us))),
        iteration_us=step_us(problem, schedule),
        forward_us=problem.forward_us,
        backward_us=problem.backward_us,
        update_us=sharded.own_update_us(problem, sharded.owners_of(schedule), updates=False),
        steps=SHOWN,
        error_us=0.0,
    )


def _computed(ran: Run) -> list[WindowSpan]:
    """Forward, backward and update of each step; forward in several parts where it waits, or only some are critical."""
    path, spans = set(ran.critical_path()), list[WindowSpan]()
    for number in ran.lanes[COMPUTE]:
        op, critical = ran.ops[number], number in path
        start_us, end_us = ran.start_us[number], ran.end_us[number]
        last = spans[-1] if spans else None
        if op.time_us <= 0.0 and op.kind != "update":
            continue
        if last is not None and (last.task, last.end_us, last.critical) == (_named(op), start_us, critical):
            spans[-1] = replace(last, end_us=end_us)
            continue
        spans.append(
            WindowSpan(
                task=_named(op), resource="compute", start_us=start_us, end_us=end_us, step=op.step, critical=critical
            )
        )
    return spans


def _named(op: Op) -> str:
    return f"{op.kind} {op.step}" if op.step else op.kind


def _sent(problem: Problem, schedule: Schedule, ran: Run) -> list[WindowSpan]:
    groups = {min(group): tuple(sorted(group)) for group in _mode(schedule).groups(len(schedule.buckets))}
    path, spans = set(ran.critical_path()), []
    for number in ran.lanes[NETWORK]:
        op = ran.ops[number]
        assert op.bucket is not None
        together = groups[op.bucket] if op.kind == ALL_GATHER else (op.bucket,)
        several = len(together) > 1
        name = f"buckets {format_indices(together)}" if several else f"bucket {op.bucket}"
        spans.append(
            WindowSpan(
                task=f"{name} {op.kind}", resource="network", start_us=ran.start_us[number],
                end_us=ran.end_us[number], bucket=op.bucket,
                ready_us=ran.end_us[op.after[0]] if op.after else 0.0, step=op.step,
                buckets=together if several else (), critical=number in path,
            )
        )  # fmt: skip
    return spans


def critical_path(problem: Problem, schedule: Schedule) -> dict[str, float]:
    """Return the shares of kinds of task in three steps."""
    return run(ops_of(problem, schedule, 3)).shares()


# As in the sharded step: both halves send what an all-reduce does, and nothing rests on more.
message_bytes = sharded.message_bytes


def assumptions(problem: Problem) -> tuple[list[str], bool]:
    """Return sources of the costs of both halves and of forward's needs, and whether costs are implied."""
    scatter, gather = problem.reduce_scatter, problem.all_gather
    notes = [f"{REDUCE_SCATTER}: {scatter.source}, {ALL_GATHER}: {gather.source}", described_needs(problem)]
    return notes, scatter.implied or gather.implied


def described_needs(problem: Problem) -> str:
    """Return the source of the times at which forward needs weights, in words."""
    return f"when forward needs weights: by {needs(problem).source}"


def notes(problem: Problem, step: StepPlan) -> list[str]:
    """Return what late gathers save, for readers who have allowed them."""
    inside = "" if step.sharded_us is None else f"{ms(step.sharded_us)} where they are gathered inside the step, "
    return [
        f"ranks share the optimizer's step, and weights are gathered beside the next forward: predicted "
        f"{ms(step.late_us or 0.0)} a step, {inside}{ms(step.replicated_us or 0.0)} where every rank updates all "
        f"weights{sharded.saved_memory(problem, step)}; {described_needs(problem)}",
        *owned.notes(problem, step.owners or {}, updates=False),
    ]


def plan_fields(problem: Problem, schedule: Schedule) -> dict[str, Any]:
    """Return the interface that scripts have to know of, and which buckets are gathered together."""
    step = StepPlan(
        sharded=True,
        gather="forward",
        gathers=_mode(schedule).gathers,
        owners=sharded.named_owners(problem, schedule),
        gather_us=sum(gather.cost_us for gather in gathers_of(problem, schedule)),
    )
    return {"interface": (LATE_GATHER,), "updates": UpdatePlan(step=step)}


def describe(plan: Plan) -> PlanWords | None:
    """Return the description of a plan whose weights are gathered during forward."""
    if not plan.gathers:
        return None
    return PlanWords(
        short="gathers beside forward",
        line="weights are gathered beside the next forward: each module waits for its own just before it runs",
        paragraph="Weights are gathered beside the next forward, in which each module waits for its own. The time line "
        "shows two steps, from the start of a forward; outlined is what their length comes from.",
        form="reduce_scatter, all_gather",
    )


def explain(problem: Problem, schedule: Schedule, timeline: Timeline) -> list[str]:
    """Return what merging saves in each bucket's reduce-scatter, both halves' times, and how long forward waits."""
    members = [bucket.gradients for bucket in schedule.buckets]
    scatter = partial(sharded.push_us, problem)
    owners = sharded.owners_of(schedule)
    alone_us = owned.costs_us(problem, [(gradient,) for gradient in range(problem.count)], owners, scatter)
    gathers = {bucket: gather for gather in gathers_of(problem, schedule) for bucket in gather.buckets}
    exposed_us = _waits_us(timeline)
    reasons = []
    for index, (bucket, push_us) in enumerate(
        zip(schedule.buckets, owned.costs_us(problem, members, owners, scatter), strict=True)
    ):
        gather = gathers[index]
        push, pull = push_and_pull(push_us, gather.cost_us)
        others = sorted(set(gather.buckets) - {index})
        together = f" with {'buckets' if others[1:] else 'bucket'} {format_indices(others)}" if others else ""
        exposed = exposure(exposed_us[min(gather.buckets)])
        reasons.append(f"{merging(bucket, alone_us, push_us)}; {push}, {pull}{together}, {exposed}")
    return reasons


def _waits_us(timeline: Timeline) -> dict[int, float]:
    """Return how long forward waits for each gather, by its first bucket."""
    spans = [span for span in timeline.spans if isinstance(span, StepSpan) and span.step == 0]
    waits_us, before_us = dict[float, float](), 0.0
    for span in spans:
        if span.task == "forward":
            waits_us[span.start_us] = span.start_us - before_us
            before_us = span.end_us
    return {
        span.bucket: waits_us.get(span.end_us, 0.0)
        for span in spans if span.bucket is not None and span.task.endswith(ALL_GATHER)
    }  # fmt: skip


def largest_bytes(problem: Problem, schedule: Schedule) -> int:
    """Return the bytes of a step's largest message."""
    buckets: Sequence[Bucket] = schedule.buckets
    groups = [_members(schedule, group) for group in _mode(schedule).groups(len(buckets))]
    members = [*(bucket.gradients for bucket in buckets), *groups]
    return int(max(map(sum, owned.message_sizes(problem, members, sharded.owners_of(schedule)))))
