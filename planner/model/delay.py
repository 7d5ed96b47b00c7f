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

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from planner.model.delay_load import StepWork
from planner.model.engine import COMPUTE, NETWORK, Op, Ops, Run, run
from planner.model.problem import Problem
from runtime.plan.timeline import Span, Timeline

PUSH, PULL = "reduce_scatter", "all_gather"
SCATTER, GATHER, SPREAD = "node_reduce_scatter", "node_all_gather", "spread"
INSIDE, SPREADING = "intra", "intra, pulled"
"""Lanes where nodes have several ranks; the network between them is `inter`."""

REPEATS = 1e-9
"""A state repeats where it differs by less than this share of the step."""
CYCLES = (3, 12, 48)
"""Cycles that are simulated, until the state repeats."""
WORK = 20_000
"""Buckets, over all steps, beyond which no more cycles are simulated (some 0.1 s)."""
SHOWN = 4
"""Cycles that a timeline shows, where it takes several until the state repeats."""


def ops_of(load: StepWork, k: int, steps: int, head_us: float = 0.0) -> Ops:
    """Return the ops of steps of which 0, k, 2k, … pull; the network is busy for `head_us` before."""
    ops, buckets, nodes = Ops(), range(len(load.ready_us)), bool(load.scatter_us)
    network = "inter" if nodes else NETWORK
    in_order = sorted(buckets, key=lambda bucket: load.ready_us[bucket])
    ops.add(Op(network, head_us, kind="before"))
    pushed: list[Ends] = [() for _ in buckets]
    pulled: Ends = ()  # of the step before: each bucket's push, and the last message of a pull
    for step in range(steps):
        done_us, made = load.forward_us, [0 for _ in buckets]  # by bucket, the op after which it can be pushed
        ops.add(Op(COMPUTE, load.forward_us, kind="forward", step=step))
        for b in in_order:
            ops.add(Op(COMPUTE, load.ready_us[b] - done_us, kind="backward", step=step))
            pack_us, done_us = load.pack_us[b] if load.pack_us else 0.0, load.ready_us[b]
            made[b] = ops.add(Op(COMPUTE, pack_us, pushed[b], "pack", step, b))
        if nodes:
            for b in buckets:
                made[b] = ops.add(Op(INSIDE, load.scatter_us[b], (made[b],), SCATTER, step, b, load.factors[b]))
                gathered = ops.add(Op(INSIDE, load.gather_us[b], (), GATHER, step, b, load.factors[b]))
            ops.add(Op(COMPUTE, 0.0, (gathered,), "average", step))
        update_us = load.local_update_us + (load.take_us if pulled else 0.0)
        ops.add(Op(COMPUTE, update_us, pulled, "update", step))
        for b in buckets:
            pushed[b] = (ops.add(Op(network, load.push_us[b], (made[b],), PUSH, step, b, load.factors[b])),)
        ops.add(Op(network, load.owner_us, kind="owner_update", step=step))
        pulled = ()
        if step % k == 0:
            for b in buckets:
                pulled = (ops.add(Op(network, load.pull_us[b], (), PULL, step, b, load.factors[b])),)
                if nodes:
                    pulled = (ops.add(Op(SPREADING, load.spread_us[b], pulled, SPREAD, step, b, load.factors[b])),)
    return ops


Ends = tuple[int, ...]
"""Ops that have to have ended: one or none."""


@dataclass(frozen=True, kw_only=True)
class SteadyState:
    """Steps after which the state is what it was before them."""

    mean_us: float
    error_us: float
    """Error of the mean step: 0 where the state repeats; a bound without contention, else an estimate."""
    first: int
    """The step of the simulation that they begin with, a multiple of k."""
    steps: int
    ran: Run

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
    """Return the last cycles after which a state repeats, else the later half of them."""
    steps = cycles * k + 2  # messages end beside later steps
    ran = run(ops_of(load, k, steps, head_us))
    compute = ran.lanes[COMPUTE]
    per_step = len(compute) // steps  # a step begins with the end of the update before it
    starts = np.array([ran.end_us[compute[cycle * k * per_step - 1]] for cycle in range(1, cycles + 1)])
    sent = _sent(ran)
    ends = np.array([[ran.end_us[number] for number in sent[cycle * k - 1]] for cycle in range(1, cycles + 1)])
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
            ran=ran,
        )

    for last in range(1, cycles):
        for first in reversed(range(last)):
            found = window(first, last)
            if found.settled:
                return found
    return window((cycles - 1) // 2, cycles - 1)


def _sent(ran: Run) -> dict[int, list[int]]:
    """Return by step the messages that may end during later ones, and the owners' update."""
    found: dict[int, list[int]] = {}
    for number, op in enumerate(ran.ops):
        if op.lane not in (COMPUTE, INSIDE) and op.kind != "before":
            found.setdefault(op.step, []).append(number)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpan(Span):
    """A task of one of several steps."""

    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CycleTimeline(Timeline):
    """Tasks that begin in a whole number of cycles; `iteration_us` is the mean step, `update_us` the local update.

    The first step is one that pulls. Messages of the last one may end after it.
    """

    steps: int
    error_us: float
    """Error of `iteration_us`; 0 where the state repeats."""


def simulate_cycle(problem: Problem, load: StepWork, k: int) -> CycleTimeline:
    """Return the steady state with a delay of k steps, from a step that pulls."""
    found = steady_state(load, k)
    begin_us = next(
        start_us
        for op, start_us in zip(found.ran.ops, found.ran.start_us, strict=True)
        if op.lane == COMPUTE and op.step == found.first
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
    ran, open_span = found.ran, None
    for number in ran.lanes[COMPUTE]:
        op, start_us, end_us = ran.ops[number], ran.start_us[number], ran.end_us[number]
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
    """Yield messages, with the earliest time at which they could begin where they wait for another lane."""
    ran = found.ran
    for number in chain.from_iterable(numbers for lane, numbers in ran.lanes.items() if lane != COMPUTE):
        op = ran.ops[number]
        step = op.step - found.first
        if op.bucket is not None and 0 <= step < found.steps:
            yield StepSpan(
                task=f"bucket {op.bucket} {op.kind}", resource="intra" if op.lane == SPREADING else op.lane,
                start_us=ran.start_us[number], end_us=ran.end_us[number], bucket=op.bucket,
                ready_us=ran.end_us[op.after[0]] if op.after else None, step=step,
            )  # fmt: skip
