"""Outer steps: local steps of every worker, and rounds of fragments in between, simulated over a whole period.

A step is forward, backward and update; nodes as workers average gradients over their ranks. Behind the step at which a
fragment is due its buckets are encoded, if they are compressed, and sent one after the other; `delay_steps` later the
worker waits for them, and decodes them. Weights of a dense bucket are scattered to their owners, and anchors gathered.
Sources: DiLoCo (Douillard et al., arXiv 2311.08105), Streaming DiLoCo (arXiv 2501.18512).

Approximated: packing weights, the outer step and mixing take as long as with a delay, or where that was not measured no
time, and what workers report to each other takes none; messages slow computation, and are slowed, as the all-reduce of
the bucket is during backward; the warm-up does not count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, ClassVar

from planner.documents.text import ms, pluralize
from planner.ir import Mode, Schedule
from planner.model.codecs import codec_of
from planner.model.delay import CycleTimeline, StepSpan
from planner.model.engine import COMPUTE, Op, Ops, Run, run
from planner.model.outer_load import (
    RANK,
    SHARDED_NODE,
    Worker,
    costs_of_nodes,
    exchange_inside,
    local_us,
    own_update_us,
    round_of,
)
from planner.model.problem import Problem
from planner.model.reasons import PlanWords
from planner.model.spending import slowdowns
from runtime.plan import Accuracy, OuterOptimizer, OuterSpec, Plan, PlanWorld, combinations
from runtime.plan.interfaces import OUTER, SHARDED_STEP
from runtime.plan.timeline import Timeline

WARMUP_STEPS = 500
"""Synchronous steps before local ones."""
MIX = 0.5
"""Share of a worker's own weights where a round takes steps to arrive, whose local steps would be dropped else."""
DILOCO, MEAN = OuterOptimizer(), OuterOptimizer(lr=1.0, momentum=0.0)
"""The published outer optimizer, and the mean of workers' weights."""
PERIODS = 3
"""Periods that are simulated; the last one counts."""


@dataclass(frozen=True)
class OuterSteps(Mode):
    """Each fragment, a run of buckets, is averaged after every H-th step.

    >>> str(OuterSteps(30, (2, 1), 1))
    'outer every=30 fragments=2,1 delay=1'
    >>> str(OuterSteps(8, mean=True))
    'outer every=8 mean'
    """

    name: ClassVar[str] = combinations.OUTER
    accuracy: ClassVar[Accuracy] = "relaxed"

    every: int
    fragments: tuple[int, ...] = ()
    """Number of buckets of each fragment; empty: one of all."""
    late: int = 0
    """Steps from a round's launch to its end (`delay_steps`)."""
    worker: Worker = RANK
    """Unit that trains alone: a rank, or a node where it has several ranks, whose step may be sharded."""
    mean: bool = False
    """Whether the outer step takes the mean of workers' weights, as local SGD does; else it is DiLoCo's."""

    def __str__(self) -> str:
        cuts = f" fragments={','.join(map(str, self.fragments))}" if self.fragments else ""
        late = f" delay={self.late}" if self.late else ""
        worker = f" worker={self.worker}" if self.worker != RANK else ""
        return f"outer every={self.every}{cuts}{late}{worker}" + (" mean" if self.mean else "")

    @classmethod
    def parse(cls, line: str) -> Mode | None:
        number = "[1-9][0-9]{0,8}"
        match = re.fullmatch(
            rf"outer every=({number})(?: fragments=({number}(?:,{number})*))?(?: delay=({number}))?"
            r"(?: worker=(node|sharded-node))?( mean)?",
            line,
        )
        if match is None:
            return None
        cuts = tuple(map(int, match[2].split(","))) if match[2] else ()
        worker: Worker = RANK if match[4] is None else "node" if match[4] == "node" else SHARDED_NODE
        return cls(int(match[1]), cuts, int(match[3] or 0), worker, match[5] is not None)

    def fitted(self, buckets: int) -> Mode:
        """Return the mode with one fragment where the buckets are no longer those that were cut."""
        return self if sum(self.fragments) == buckets or not self.fragments else replace(self, fragments=())


def mode_of(schedule: Schedule) -> OuterSteps:
    """Return the mode. Raises ValueError for a schedule of another one."""
    if not isinstance(schedule.mode, OuterSteps):
        raise ValueError("the schedule has no outer steps")
    return schedule.mode


def fragments_of(schedule: Schedule) -> list[range]:
    """Return the buckets of each fragment."""
    sizes = mode_of(schedule).fragments or (len(schedule.buckets),)
    return [range(*place) for place in pairwise(accumulate(sizes, initial=0))]


def due(mode: OuterSteps, fragment: int, fragments: int) -> int:
    """Return the first step, from 1, behind which a fragment is sent."""
    return OuterSpec(every=mode.every).due_after(fragment, fragments)


def defect(schedule: Schedule, gradients: int) -> str | None:
    """Return why no run could carry the mode out."""
    mode = mode_of(schedule)
    if mode.fragments and sum(mode.fragments) != len(schedule.buckets):
        return f"fragments of {sum(mode.fragments)} buckets, but there are {len(schedule.buckets)}"
    return OuterSpec(every=mode.every, delay_steps=mode.late).problem("outer") or (
        f"{len(mode.fragments)} fragments in {mode.every} steps: two would be sent behind one"
        if len(mode.fragments) > mode.every
        else None
    )


def compute_us(problem: Problem, worker: Worker = RANK) -> float:
    """Return the length of a step without any communication."""
    return problem.compute_end_us + own_update_us(problem, worker)


def alone_us(problem: Problem, schedule: Schedule) -> float:
    """Return the length of a step without communication between workers."""
    return local_us(problem, mode_of(schedule).worker, schedule.buckets)


def ops_of(problem: Problem, schedule: Schedule, periods: int) -> Ops:
    """Return the ops of some periods; in `Op.step` steps count from 0."""
    mode, fragments = mode_of(schedule), fragments_of(schedule)
    spent = [round_of(problem, mode.worker, bucket) for bucket in schedule.buckets]
    update_us = exchange_inside(problem, mode.worker, schedule.buckets).end_us
    behind_us = alone_us(problem, schedule) - compute_us(problem) + (problem.update_us - update_us)
    factors = slowdowns(problem, schedule.buckets, spent)
    first = [due(mode, index, len(fragments)) for index in range(len(fragments))]
    launched: dict[int, tuple[int, tuple[int, ...]]] = {}
    ops = Ops()

    def finish(fragment: int, step: int) -> None:
        _, messages = launched.pop(fragment)
        after_us = sum(spent[bucket].after_us for bucket in fragments[fragment])
        ops.add(Op(COMPUTE, after_us, messages, "outer", step - 1))

    for step in range(1, periods * mode.every + 1):
        for kind, time_us in (
            ("forward", problem.forward_us), ("backward", problem.backward_us + behind_us),
            ("update", update_us),
        ):  # fmt: skip
            ops.add(Op(COMPUTE, time_us, kind=kind, step=step - 1))
        for index, buckets in enumerate(fragments):
            if index in launched and step >= launched[index][0] + mode.late:
                finish(index, step)
            if step % mode.every != first[index] % mode.every:
                continue
            sent = []
            for bucket in buckets:
                ready = ops.add(Op(COMPUTE, spent[bucket].before_us, (), "encode", step - 1))
                before: tuple[int, ...] = (ready,)
                for message in spent[bucket].messages:
                    number = ops.add(
                        Op(message.resource, message.time_us, before, "round", step - 1, bucket, factors[bucket])
                    )
                    before = (number,)
                sent.append(before[0])
            launched[index] = (step, tuple(sent))
            if mode.late == 0:
                finish(index, step)
    return ops


@lru_cache(maxsize=256)
def _period(problem: Problem, schedule: Schedule) -> tuple[Run, float, float]:
    """Return the simulation, and begin and end of its last period."""
    every = mode_of(schedule).every
    ran = run(ops_of(problem, schedule, PERIODS))
    ends = {ran.ops[number].step: ran.end_us[number] for number in ran.lanes[COMPUTE]}
    return ran, ends[(PERIODS - 1) * every - 1], ends[PERIODS * every - 1]


def step_us(problem: Problem, schedule: Schedule) -> float:
    """Return the mean step of a period.

    Where no round begins before the one before it is taken, a longer period has more steps without communication, and
    nothing else: of those one of the fewest steps is simulated.
    """
    mode, count = mode_of(schedule), len(fragments_of(schedule))
    fewest = min(mode.every, count * (mode.late + 1))
    _, begin_us, end_us = _period(problem, replace(schedule, mode=replace(mode, every=fewest)))
    return (end_us - begin_us + (mode.every - fewest) * alone_us(problem, schedule)) / mode.every


def simulate(problem: Problem, schedule: Schedule) -> CycleTimeline:
    """Return a whole period; steps between which nothing is waited for are one task."""
    ran, begin_us, _ = _period(problem, schedule)
    every = mode_of(schedule).every
    first = (PERIODS - 1) * every
    spans: list[StepSpan] = []
    run_of: list[tuple[int, float, float]] = []  # (step, start, end) of neighbouring steps

    def close() -> None:
        if run_of:
            (begin, start_us, _), (last, _, stop_us) = run_of[0], run_of[-1]
            name = f"local step {begin}" if begin == last else f"local steps {begin} to {last}"
            spans.append(StepSpan(task=name, resource=COMPUTE, start_us=start_us, end_us=stop_us, step=begin))
            run_of.clear()

    for number, op in enumerate(ran.ops):
        step = op.step - first
        if not 0 <= step < every:
            continue
        start_us, stop_us = ran.start_us[number] - begin_us, ran.end_us[number] - begin_us
        if op.lane != COMPUTE:
            spans.append(
                StepSpan(
                    task=f"bucket {op.bucket} round", resource=op.lane, start_us=start_us, end_us=stop_us,
                    bucket=op.bucket, ready_us=ran.end_us[op.after[0]] - begin_us, step=step,
                )
            )  # fmt: skip
        elif op.kind in ("encode", "outer"):
            if op.time_us > 0.0 or op.kind == "outer":
                close()
            if op.time_us > 0.0:
                spans.append(StepSpan(task=op.kind, resource=COMPUTE, start_us=start_us, end_us=stop_us, step=step))
        else:
            run_of.append((step, max(0.0, start_us), stop_us))
    close()
    spans.sort(key=lambda span: (span.start_us, span.end_us, span.task))
    return CycleTimeline(
        spans=tuple(spans), iteration_us=step_us(problem, schedule), forward_us=problem.forward_us,
        backward_us=problem.backward_us, steps=every, error_us=0.0,
        update_us=exchange_inside(problem, mode_of(schedule).worker, schedule.buckets).end_us,
    )  # fmt: skip


def critical_path(problem: Problem, schedule: Schedule) -> dict[str, float]:
    return _period(problem, schedule)[0].shares()


def message_bytes(problem: Problem, schedule: Schedule) -> dict[str, float]:
    """Return bytes of rounds, and of gradients that are averaged inside of nodes, in a mean step."""
    total, mode = dict[str, float](), mode_of(schedule)
    for bucket in schedule.buckets:
        for message in round_of(problem, mode.worker, bucket).messages:
            total[message.resource] = total.get(message.resource, 0.0) + message.sent_bytes / mode.every
    if costs_of_nodes(problem, mode.worker) is not None:
        total["intra"] = 2.0 * float(problem.size_bytes.sum())
    return total


def assumptions(problem: Problem) -> tuple[list[str], bool]:
    free = "" if problem.cost.cluster.pull_take else "packing, outer step and mixing free (no `pull_take` given); "
    return [f"{free}rounds cost as all-reduces, or as both halves of one where these are known"], False


def plan_fields(problem: Problem, schedule: Schedule) -> dict[str, Any]:
    """Return `outer`, and the interface that scripts have to know of. Without the number of nodes in `world`, ranks are
    the workers wherever they are.
    """
    mode, gradients = mode_of(schedule), problem.profile.compute.gradients
    fragments = tuple(
        tuple(gradients[index].name for bucket in buckets for index in schedule.buckets[bucket].gradients)
        for buckets in fragments_of(schedule)
    )
    shares = mode.worker == SHARDED_NODE
    fields: dict[str, Any] = {
        "interface": (SHARDED_STEP, OUTER) if shares else (OUTER,),
        "outer": OuterSpec(
            every=mode.every, fragments=fragments, delay_steps=mode.late, mix=MIX if mode.late else 0.0,
            warmup_steps=WARMUP_STEPS, optimizer=MEAN if mode.mean else DILOCO, sharded_step=shares or None,
        ),
    }  # fmt: skip
    if costs_of_nodes(problem, mode.worker) is None and problem.cost.cluster.ranks_per_node > 1:
        fields["world"] = PlanWorld(ranks=problem.ranks, torch=problem.profile.world.torch)
    return fields


def describe(plan: Plan) -> PlanWords | None:
    """Return the description of a plan with outer steps: how often fragments are averaged, and by which optimizer."""
    spec = plan.outer
    if spec is None:
        return None
    parts, rule = pluralize(len(spec.fragments or ((),)), "fragment"), spec.optimizer
    late = f"{pluralize(spec.delay_steps, 'step')} later" if spec.delay_steps else "at once"
    short = f"outer H = {spec.every}"
    nodes = plan.world.nodes or plan.world.ranks
    whose = f" between {nodes} nodes" if nodes < plan.world.ranks else ""
    whose += ", inside of which the optimizer step is sharded," if spec.sharded_step else ""
    return PlanWords(
        short=short,
        line=f"{short}: {parts}, each averaged after every {pluralize(spec.every, 'local step')}{whose} and taken "
        f"{late}; outer {rule.name} with lr {rule.lr:g} and momentum {rule.momentum:g}; "
        f"{pluralize(spec.warmup_steps, 'synchronous step')} first",
        paragraph=f"With outer steps: workers train alone, and after every {spec.every} steps the mean of their "
        f"weights moves the weights that they share. The time is the mean step of a period, which the time line shows.",
    )


def explain(problem: Problem, schedule: Schedule, timeline: Timeline) -> list[str]:
    """Return of each bucket its fragment, when it is sent, and how much of its round no local step hides; of nodes as
    workers also how long its average inside of them takes in each step.
    """
    mode, fragments, reasons = mode_of(schedule), fragments_of(schedule), []
    inside = exchange_inside(problem, mode.worker, schedule.buckets)
    step_alone_us = alone_us(problem, schedule)
    for index, buckets in enumerate(fragments):
        for number, bucket in ((number, schedule.buckets[number]) for number in buckets):
            time_us = sum(message.time_us for message in round_of(problem, mode.worker, bucket).messages)
            hidden_us = min(time_us, mode.late * step_alone_us)
            step = due(mode, index, len(fragments))
            reason = (
                f"fragment {index}, {codec_of(bucket).content_text(bucket)}, sent behind step {step} of {mode.every}: "
                f"{ms(time_us)}, of which {ms(hidden_us)} during {pluralize(mode.late, 'step')}"
            )
            if inside.collectives:
                reason += f"; averaged inside nodes in every step: {ms(inside.costs_us[number])}"
            if inside.gathers_us:
                reason += f", and weights gathered there: {ms(inside.gathers_us[number])}"
            reasons.append(reason)
    return reasons
