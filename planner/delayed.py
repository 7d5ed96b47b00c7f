"""The steady state of delayed synchronization (SSD-SGD): the mean step, and the timeline of one cycle of k steps.

In each step every bucket is pushed (reduce-scattered to the owners of its parts) when it is ready, one message at a
time, beside backward and beyond it. Behind the last push of a step the owners update their parts; after every k-th step
the new weights are pulled (all-gathered), bucket by bucket, before anything else is pushed. Pulls travel during the
next step, whose local update waits for them. The local update takes the optimizer's place at the end of each step, and
the next forward begins at once. Nothing else waits for the network, but that no rank is more than one step ahead of its
pushes: a bucket is packed again only when its last push has ended, and backward waits for that.

Approximated: the owners' update takes their share of the optimizer's time, and neither slows anything nor is slowed;
packing is free; a push and a pull contend with computation as the all-reduce of the bucket does, for nobody measured
them apart; the synchronous steps at the beginning of training do not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from planner.cost.ssd import Terms
from planner.ir import Schedule
from planner.lanes import Lane, Piece, run_lanes
from planner.problem import Problem
from runtime.timeline import Span, Timeline

PUSH, PULL = "reduce_scatter", "all_gather"

REPEATS = 1e-9
"""A state repeats where it differs by less than this share of the step."""
CYCLES = (3, 12, 48)
"""Cycles that are simulated, until the state repeats."""
WORK = 20_000
"""Buckets, over all steps, beyond which no more cycles are simulated (some 0.1 s)."""
SHOWN = 4
"""Cycles that a timeline shows, where it takes several until the state repeats."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one step asks of compute and network, each alone on the machine."""

    forward_us: float
    ready_us: tuple[float, ...]
    """Of each bucket, from the start of forward."""
    push_us: tuple[float, ...]
    pull_us: tuple[float, ...]
    factors: tuple[tuple[float, float], ...]
    owner_us: float
    """The update of a rank's own part of the weights."""
    local_update_us: float

    @classmethod
    def of(cls, problem: Problem, schedule: Schedule, local_update_us: float | None = None) -> Load:
        """The load of a schedule; `local_update_us` in place of what the cluster says."""
        members = [bucket.gradients for bucket in schedule.buckets]
        return cls(
            forward_us=problem.forward_us,
            ready_us=tuple(problem.ready_list_us[max(gradients)] for gradients in members),
            push_us=tuple(problem.bucket_cost_us(members, problem.push.curve)),
            pull_us=tuple(problem.bucket_cost_us(members, problem.pull.curve)),
            factors=tuple(problem.bucket_factors(members)),
            owner_us=problem.update_us / problem.ranks,
            local_update_us=problem.local_update_us if local_update_us is None else local_update_us,
        )

    @property
    def compute_us(self) -> float:
        """A step without communication."""
        return max(self.ready_us) + self.local_update_us

    @property
    def terms(self) -> Terms:
        """What Eq. 4 is made of; its sync is a part of the reduce-scatter here."""
        return Terms(
            forward_us=self.forward_us,
            backward_us=max(self.ready_us) - self.forward_us,
            first_us=min(self.ready_us) - self.forward_us,
            push_us=sum(self.push_us),
            exchange_us=sum(self.push_us) + self.owner_us + sum(self.pull_us),
            local_update_us=self.local_update_us,
        )


def pieces(load: Load, k: int, steps: int, head_us: float = 0.0) -> tuple[list[Piece], list[Piece]]:
    """What compute and the network do in so many steps from the beginning; steps 0, k, 2k, … pull.

    Args:
        load: one step.
        k: every how many steps weights are pulled.
        steps: their number.
        head_us: for how long the network is busy with something else at first.
    """
    buckets = range(len(load.ready_us))
    in_order = sorted(buckets, key=lambda bucket: load.ready_us[bucket])
    compute: list[Piece] = []
    network = [Piece(head_us, kind="before")]
    pushed, pulled = [-1] * len(buckets), -1
    for step in range(steps):
        compute.append(Piece(load.forward_us, kind="forward", step=step))
        packed, done_us = [-1] * len(buckets), load.forward_us
        for bucket in in_order:
            compute.append(Piece(load.ready_us[bucket] - done_us, kind="backward", step=step))
            packed[bucket], done_us = len(compute), load.ready_us[bucket]
            compute.append(Piece(0.0, pushed[bucket], "pack", step, bucket))
        compute.append(Piece(load.local_update_us, pulled, "update", step))
        pushed, pulled = [len(network) + bucket for bucket in buckets], -1
        network += [Piece(load.push_us[b], packed[b], PUSH, step, b, load.factors[b]) for b in buckets]
        if step % k == 0:
            network.append(Piece(load.owner_us, kind="owner_update", step=step))
            network += [Piece(load.pull_us[b], -1, PULL, step, b, load.factors[b]) for b in buckets]
            pulled = len(network) - 1
    return compute, network


@dataclass(frozen=True, kw_only=True)
class Steady:
    """Steps after which the state is what it was before them."""

    mean_us: float
    error_us: float
    """By how much the mean step may be off: 0 where the state repeats. A bound without contention, else an estimate."""
    first: int
    """The step of the simulation that they begin with, a multiple of k."""
    steps: int
    compute: Lane
    network: Lane

    @property
    def settled(self) -> bool:
        """Whether the state repeats."""
        return self.error_us <= REPEATS * self.mean_us


def steady_state(load: Load, k: int) -> Steady:
    """Simulates cycles of k steps until the state at the beginning of one is that of an earlier one.

    The state is when the messages of earlier steps end, from the beginning of the step. As no rank is more than one
    step ahead, these are the messages of the last step. Without contention all times are maxima of sums, so the mean
    does not depend on the state that one begins with. Where network and computation take nearly as long, a backlog
    grows or goes down by little in each cycle. So an idle network is tried first, and then one that is behind as far as
    it can be: a backlog that has to grow is there at once, and one that has to go down was never there.
    """
    behind_us = 2.0 * (load.compute_us + load.terms.exchange_us)
    best: Steady | None = None
    for cycles in CYCLES:
        if best is not None and cycles * k * len(load.ready_us) > WORK:
            break
        for head_us in (0.0, behind_us):
            found = _simulate(load, k, cycles, head_us)
            if best is None or found.error_us < best.error_us:
                best = found
            if found.settled:
                return found
    assert best is not None
    return best


def _simulate(load: Load, k: int, cycles: int, head_us: float) -> Steady:
    """The last cycles after which a state repeats, else the later half of them."""
    compute, network = run_lanes(*pieces(load, k, cycles * k + 2, head_us))  # messages end beside later steps
    count = len(load.ready_us)
    starts = np.array([_start_us(compute, count, cycle * k) for cycle in range(1, cycles + 1)])
    ends = np.array([network.end_us[_sent(count, k, cycle * k - 1)] for cycle in range(1, cycles + 1)])
    states = np.maximum(ends - starts[:, None], 0.0)

    def window(first: int, last: int) -> Steady:
        steps = (last - first) * k
        mean_us = float(starts[last] - starts[first]) / steps
        error_us = float(np.abs(states[last] - states[first]).max()) / steps
        shown = last - first if last - first <= SHOWN else 1
        return Steady(
            mean_us=load.compute_us if abs(mean_us - load.compute_us) <= REPEATS * mean_us else mean_us,
            error_us=0.0 if error_us <= REPEATS * mean_us else error_us,
            first=(1 + last - shown) * k,
            steps=shown * k,
            compute=compute,
            network=network,
        )

    for last in range(1, cycles):
        for first in reversed(range(last)):
            found = window(first, last)
            if found.settled:
                return found
    return window((cycles - 1) // 2, cycles - 1)


def _start_us(compute: Lane, buckets: int, step: int) -> float:
    """When a step begins: with the end of the update before it."""
    return compute.end_us[step * (2 * buckets + 2) - 1]


def _sent(buckets: int, k: int, step: int) -> slice:
    """The messages of a step, and the owners' update, in the network's pieces."""

    def begin(of: int) -> int:
        return 1 + of * buckets + -(-of // k) * (buckets + 1)

    return slice(begin(step), begin(step + 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpan(Span):
    """A task of one of several steps."""

    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CycleTimeline(Timeline):
    """What begins in a whole number of cycles; `iteration_us` is the mean step, `update_us` the local update.

    The first step is one that pulls. Messages of the last one may end after it.
    """

    steps: int
    error_us: float
    """By how much `iteration_us` may be off; 0 where the state repeats."""


def simulate_delayed(problem: Problem, schedule: Schedule) -> CycleTimeline:
    """The steady state of a schedule with delay."""
    load, k = Load.of(problem, schedule), _delay(schedule)
    found = steady_state(load, k)
    begin_us = _start_us(found.compute, len(load.ready_us), found.first)
    spans = [
        replace(span, start_us=max(0.0, span.start_us - begin_us), end_us=max(0.0, span.end_us - begin_us),
                ready_us=None if span.ready_us is None else max(0.0, span.ready_us - begin_us))
        for span in (*_computed(found), *_sent_spans(found))
    ]  # fmt: skip
    return CycleTimeline(
        spans=tuple(sorted(spans, key=lambda span: (span.start_us, span.end_us))),
        iteration_us=found.mean_us,
        forward_us=problem.forward_us,
        backward_us=problem.backward_us,
        update_us=load.local_update_us,
        steps=found.steps,
        error_us=found.error_us,
    )


def delayed_step_us(problem: Problem, schedule: Schedule, local_update_us: float | None = None) -> float:
    """The mean step alone; `local_update_us` in place of what the cluster says."""
    return steady_state(Load.of(problem, schedule, local_update_us), _delay(schedule)).mean_us


def _delay(schedule: Schedule) -> int:
    if schedule.delay is None:
        raise ValueError("the schedule has no delay")
    return schedule.delay


def _computed(found: Steady) -> Iterator[StepSpan]:
    """Forward, backward and update of each step; backward in several parts where it has to wait."""
    lane = found.compute
    open_span: StepSpan | None = None
    for piece, start_us, end_us in zip(lane.pieces, lane.start_us, lane.end_us, strict=True):
        step = piece.step - found.first
        if not 0 <= step < found.steps or piece.kind == "pack":
            continue
        if open_span is not None:
            goes_on = piece.kind == "backward" and open_span.task.startswith("backward")
            if goes_on and open_span.end_us == start_us:
                open_span = replace(open_span, end_us=end_us)
                continue
            yield open_span
        name = f"{piece.kind} {step}" if step else piece.kind
        open_span = StepSpan(task=name, resource="compute", start_us=start_us, end_us=end_us, step=step)
    if open_span is not None:
        yield open_span


def _sent_spans(found: Steady) -> Iterator[StepSpan]:
    """Pushes, with the time at which their buckets were packed, and pulls."""
    lane = found.network
    for piece, start_us, end_us in zip(lane.pieces, lane.start_us, lane.end_us, strict=True):
        step = piece.step - found.first
        if piece.bucket is not None and 0 <= step < found.steps:
            ready_us = found.compute.end_us[piece.after] if piece.after >= 0 else None
            yield StepSpan(
                task=f"bucket {piece.bucket} {piece.kind}", resource="network", start_us=start_us, end_us=end_us,
                bucket=piece.bucket, ready_us=ready_us, step=step,
            )  # fmt: skip
