"""The steady state of delayed synchronization (SSD-SGD): the mean step, and the timeline of one cycle of k steps.

In each step every bucket is pushed (reduce-scattered to the owners of its parts) when it is ready, one message at a
time, beside backward and beyond it. Behind the last push of a step the owners update their parts; after every k-th step
the new weights are pulled (all-gathered), bucket by bucket, before anything else is pushed. Pulls travel during the
next step, whose local update waits for them and takes them over. The local update takes the optimizer's place at the
end of each step, and the next forward begins at once. Nothing else waits for the network, but that no rank is more than
one step ahead of its pushes: a bucket is packed again only when its last push has ended, and backward waits for that.

Where nodes have several ranks, the node is the worker: every bucket is reduce-scattered and gathered inside the node,
pushed between nodes as soon as it is scattered, and the local update waits for the last average. What is pulled between
nodes is spread inside them.

Approximated: where nodes have several ranks, packing is counted behind the average inside the node, for the rank's part
alone; the owners' update takes their share of the optimizer's time, and neither slows anything nor is slowed; a
push and a pull contend with computation as the all-reduce of the bucket does, for
nobody measured them apart; averages and what is spread share the links inside a node without slowing each other; the
synchronous steps at the beginning of training do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.model.delay_load import StepWork
from planner.model.lanes import Lane, Op, run_lanes
from planner.model.problem import Problem
from runtime.plan.timeline import Span, Timeline

PUSH, PULL = "reduce_scatter", "all_gather"
SCATTER, GATHER, SPREAD = "node_reduce_scatter", "node_all_gather", "spread"
COMPUTE, NETWORK, INSIDE, SPREADING = range(4)
"""Lanes; the last two only where nodes have several ranks."""

REPEATS = 1e-9
"""A state repeats where it differs by less than this share of the step."""
CYCLES = (3, 12, 48)
"""Cycles that are simulated, until the state repeats."""
WORK = 20_000
"""Buckets, over all steps, beyond which no more cycles are simulated (some 0.1 s)."""
SHOWN = 4
"""Cycles that a timeline shows, where it takes several until the state repeats."""


def ops(load: StepWork, k: int, steps: int, head_us: float = 0.0) -> tuple[list[Op], ...]:
    """What each lane does in so many steps; steps 0, k, 2k, … pull. The network is busy for `head_us` before."""
    buckets, nodes = range(len(load.ready_us)), bool(load.scatter_us)
    in_order = sorted(buckets, key=lambda bucket: load.ready_us[bucket])
    compute: list[Op] = []
    network = [Op(head_us, kind="before")]
    inside: list[Op] = []
    spread: list[Op] = []
    pushed, pulled = [-1 for _ in buckets], -1  # ops of the step before: each bucket's push, and the last of a pull
    for step in range(steps):
        compute.append(Op(load.forward_us, kind="forward", step=step))
        made, done_us = [-1 for _ in buckets], load.forward_us  # by bucket, the op after which it can be pushed
        for b in in_order:
            compute.append(Op(load.ready_us[b] - done_us, kind="backward", step=step))
            made[b], done_us = len(compute), load.ready_us[b]
            compute.append(Op(load.pack_us[b] if load.pack_us else 0.0, pushed[b], "pack", step, b, on=NETWORK))
        if nodes:
            for b in buckets:
                scatter = Op(load.scatter_us[b], made[b], SCATTER, step, b, load.factors[b])
                made[b] = len(inside)
                inside += [scatter, Op(load.gather_us[b], -1, GATHER, step, b, load.factors[b])]
            compute.append(Op(0.0, len(inside) - 1, "average", step, on=INSIDE))
        update_us = load.local_update_us + (load.take_us if pulled >= 0 else 0.0)
        compute.append(Op(update_us, pulled, "update", step, on=SPREADING if nodes else NETWORK))
        pushed, pulled = [len(network) + b for b in buckets], -1
        on = INSIDE if nodes else COMPUTE
        network += [Op(load.push_us[b], made[b], PUSH, step, b, load.factors[b], on) for b in buckets]
        network.append(Op(load.owner_us, kind="owner_update", step=step))
        if step % k == 0:
            for b in buckets:
                if nodes:
                    spread.append(Op(load.spread_us[b], len(network), SPREAD, step, b, load.factors[b], NETWORK))
                network.append(Op(load.pull_us[b], -1, PULL, step, b, load.factors[b]))
            pulled = len(spread if nodes else network) - 1
    return (compute, network, *((inside, spread) if nodes else ()))


@dataclass(frozen=True, kw_only=True)
class SteadyState:
    """Steps after which the state is what it was before them."""

    mean_us: float
    error_us: float
    """By how much the mean step may be off: 0 where the state repeats. A bound without contention, else an estimate."""
    first: int
    """The step of the simulation that they begin with, a multiple of k."""
    steps: int
    lanes: tuple[Lane, ...]

    @property
    def compute(self) -> Lane:
        return self.lanes[COMPUTE]

    @property
    def network(self) -> Lane:
        return self.lanes[NETWORK]

    @property
    def settled(self) -> bool:
        return self.error_us <= REPEATS * self.mean_us


def steady_state(load: StepWork, k: int) -> SteadyState:
    """Simulates cycles of k steps until the state at the beginning of one is that of an earlier one.

    The state is when the messages of earlier steps end, from the beginning of the step. As no rank is more than one
    step ahead, these are the messages of the last step. Without contention all times are maxima of sums, so the mean
    does not depend on the state that one begins with. Where network and computation take nearly as long, a backlog
    grows or goes down by little in each cycle. So an idle network is tried first, and then one that is behind as far as
    it can be: a backlog that has to grow is there at once, and one that has to go down was never there.
    """
    behind_us = 2.0 * (load.compute_us + load.terms.exchange_us)
    best: SteadyState | None = None
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


def _simulate(load: StepWork, k: int, cycles: int, head_us: float) -> SteadyState:
    """The last cycles after which a state repeats, else the later half of them."""
    steps = cycles * k + 2  # messages end beside later steps
    lanes = run_lanes(*ops(load, k, steps, head_us))
    sent = _sent(lanes)
    compute = lanes[COMPUTE]
    per_step = len(compute.ops) // steps  # a step begins with the end of the update before it
    starts = np.array([compute.end_us[cycle * k * per_step - 1] for cycle in range(1, cycles + 1)])
    ends = np.array([[lane.end_us[i] for lane, i in sent[cycle * k - 1]] for cycle in range(1, cycles + 1)])
    states = np.maximum(ends - starts[:, None], 0.0)

    def window(first: int, last: int) -> SteadyState:
        steps = (last - first) * k
        mean_us = float(starts[last] - starts[first]) / steps
        error_us = float(np.abs(states[last] - states[first]).max()) / steps
        shown = last - first if last - first <= SHOWN else 1
        return SteadyState(
            mean_us=load.compute_us if abs(mean_us - load.compute_us) <= REPEATS * mean_us else mean_us,
            error_us=0.0 if error_us <= REPEATS * mean_us else error_us,
            first=(1 + last - shown) * k,
            steps=shown * k,
            lanes=lanes,
        )

    for last in range(1, cycles):
        for first in reversed(range(last)):
            found = window(first, last)
            if found.settled:
                return found
    return window((cycles - 1) // 2, cycles - 1)


def _sent(lanes: tuple[Lane, ...]) -> dict[int, list[tuple[Lane, int]]]:
    """By step the messages that may end beside later ones, and the owners' update."""
    found: dict[int, list[tuple[Lane, int]]] = {}
    for lane in (lanes[NETWORK], *lanes[SPREADING:]):
        for index, op in enumerate(lane.ops):
            if op.kind != "before":
                found.setdefault(op.step, []).append((lane, index))
    return found


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


def simulate_cycle(problem: Problem, load: StepWork, k: int) -> CycleTimeline:
    """The steady state with delay of k steps, from a step that pulls."""
    found = steady_state(load, k)
    begin_us = next(
        start_us
        for op, start_us in zip(found.compute.ops, found.compute.start_us, strict=True)
        if op.step == found.first
    )
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


def _computed(found: SteadyState) -> Iterator[StepSpan]:
    """Forward, backward and update of each step; backward in several parts where it has to wait."""
    lane = found.compute
    open_span: StepSpan | None = None
    for op, start_us, end_us in zip(lane.ops, lane.start_us, lane.end_us, strict=True):
        step = op.step - found.first
        packs = op.kind in ("pack", "average")
        if not 0 <= step < found.steps or (packs and op.time_us <= 0.0):
            continue
        if open_span is not None:
            goes_on = op.kind == "backward" and open_span.task.startswith("backward")
            if goes_on and open_span.end_us == start_us:
                open_span = replace(open_span, end_us=end_us)
                continue
            yield open_span
        kind = "pack" if packs else op.kind
        name = f"{kind} {step}" if step else kind
        open_span = StepSpan(task=name, resource="compute", start_us=start_us, end_us=end_us, step=step)
    if open_span is not None:
        yield open_span


def _sent_spans(found: SteadyState) -> Iterator[StepSpan]:
    """Messages, with the time at which they could begin at the earliest where they wait for another resource."""
    names = resources(found.lanes)
    for lane, resource in zip(found.lanes[NETWORK:], names[NETWORK:], strict=True):
        for op, start_us, end_us in zip(lane.ops, lane.start_us, lane.end_us, strict=True):
            step = op.step - found.first
            if op.bucket is not None and 0 <= step < found.steps:
                waits_on = found.lanes[COMPUTE if op.on is None else op.on]
                yield StepSpan(
                    task=f"bucket {op.bucket} {op.kind}", resource=resource, start_us=start_us, end_us=end_us,
                    bucket=op.bucket, ready_us=waits_on.end_us[op.after] if op.after >= 0 else None, step=step,
                )  # fmt: skip


def resources(lanes: Sequence[object]) -> tuple[str, ...]:
    """What lanes stand for: one network, or the links between nodes and twice those inside."""
    return ("compute", "network") if len(lanes) == NETWORK + 1 else ("compute", "inter", "intra", "intra")
