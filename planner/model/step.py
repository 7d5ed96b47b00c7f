"""One step that ends when all its messages have arrived: one compute resource, and one network.

Without contention: bucket j starts at max(end of bucket j−1, its last gradient's ready time) and takes the time of
its messages; the step ends with the later of the last bucket and backward, plus the update.

With contention factors, while both resources are busy compute advances at 1/compute and the network at 1/network of
its speed; the factors are the message's where they were measured by size. A bucket of selected elements keeps compute
busy with its selection when it is ready, which delays the rest of backward, and with its unpacking at the end.
Collectives of several phases are in `planner.model.step_ops`. All times in microseconds from the start of forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from planner.cost.halves import ALL_GATHER
from planner.ir import Bucket, Places
from planner.model.codecs import Spending
from planner.model.engine import COMPUTE, NETWORK, Op, Ops, run
from planner.model.problem import Factors, Problem
from planner.model.spending import slowdowns, spending
from runtime.plan.timeline import Span, Timeline


class State(NamedTuple):
    time_us: float
    """Wall time."""
    progress_us: float
    """Compute done by then, in uncontended time from the start of forward; stops at the end of backward."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Slow-down factors (≥ 1) and the uncontended end of backward."""

    compute: float
    network: float
    compute_end_us: float
    by_range: Callable[[Places, Places], tuple[Factors, Factors]] | None = None
    """Factors of buckets [start, stop) where they depend on the bucket; `compute` and `network` are the least then."""

    @classmethod
    def of(cls, problem: Problem) -> Overlap:
        """Return the factors that were measured on a problem's machines."""
        slowdown, end_us = problem.cost.slowdown, problem.compute_end_us
        if slowdown is None:
            return cls(problem.contention.compute, problem.contention.network, end_us)
        return cls(*slowdown.least, end_us, problem.range_factors)

    def factors(self, starts: Places, stops: Places) -> tuple[Factors, Factors]:
        """Return (compute, network) during buckets [start, stop): one for all, or one for each."""
        return (self.compute, self.network) if self.by_range is None else self.by_range(starts, stops)

    def send(
        self, free: State, ready_us: float, cost_us: float, factors: tuple[float, float]
    ) -> tuple[State, State, State]:
        """Send one bucket; return its start, the end of the time that compute and network share, and its end.

        The network is free from `free`, the bucket's last gradient ready at the progress `ready_us`; it takes `cost_us`
        on an idle machine, and `factors` are (compute, network) while it is on its way.
        """
        compute, network = factors
        wait_us = max(0.0, ready_us - free.progress_us)
        start = State(free.time_us + wait_us, free.progress_us + wait_us)
        left_us = self.compute_end_us - start.progress_us
        shared_us = min(left_us * compute, cost_us * network)
        if shared_us == cost_us * network:
            end = State(start.time_us + shared_us, start.progress_us + shared_us / compute)
            return start, end, end
        shared = State(start.time_us + shared_us, self.compute_end_us)
        return start, shared, State(shared.time_us + cost_us - shared_us / network, self.compute_end_us)


class Exchange(NamedTuple):
    """Messages of a step during backward, and what follows when all have arrived."""

    collectives: Sequence[str]
    costs_us: Sequence[float]
    """Duration of each bucket's messages on an idle machine."""
    update_us: float
    gathers_us: Sequence[float] = ()
    """Duration of the all-gather of each bucket's weights after the update."""

    @property
    def end_us(self) -> float:
        """Time from the last message, or the end of backward, to the end of the step."""
        return self.update_us + sum(self.gathers_us)


def exchange_step_us(problem: Problem, buckets: Sequence[Bucket], exchange: Exchange) -> float:
    """Return `exchange_timeline(…).iteration_us` without making a timeline."""
    members = [bucket.gradients for bucket in buckets]
    ready_us = [problem.ready_list_us[max(gradients)] for gradients in members]
    ends_us = _ends_us(problem, ready_us, exchange.costs_us, problem.bucket_factors(members), 0.0)
    return max(ends_us) + exchange.end_us


def _ends_us(
    problem: Problem,
    ready_us: Sequence[float],
    costs_us: Sequence[float],
    factors: Sequence[tuple[float, float]],
    selection_us: float,
) -> list[float]:
    """Return the end of each bucket, then that of compute; `selection_us` is what backward is longer by."""
    overlap = Overlap.of(problem)
    overlap = replace(overlap, compute_end_us=overlap.compute_end_us + selection_us)
    state, ends_us = State(0.0, 0.0), []
    for ready, cost_us, slowed in zip(ready_us, costs_us, factors, strict=True):
        if problem.contended:
            state = overlap.send(state, ready, cost_us, slowed)[2]
        else:
            state = State(max(state.time_us, ready) + cost_us, overlap.compute_end_us)
        ends_us.append(state.time_us)
    if not problem.contended:
        return [*ends_us, overlap.compute_end_us]
    return [*ends_us, state.time_us + overlap.compute_end_us - state.progress_us]


BucketCost = tuple[int, float, float, float, tuple[float, float]]
"""A bucket's last gradient; its selection, message and unpacking in microseconds; its factors."""


def bucket_costs(problem: Problem, buckets: Sequence[Bucket]) -> list[BucketCost]:
    """Return the costs of buckets sent by library all-reduces, flat gathers and two shots."""
    members = [bucket.gradients for bucket in buckets]
    # What whole ones take is computed for all of them at once.
    spent = [Spending(()) if bucket.whole else spending(problem, bucket) for bucket in buckets]
    costs_us, factors = problem.bucket_cost_us(members), slowdowns(problem, buckets, spent)
    costs: list[BucketCost] = []
    for bucket, cost_us, slowed, of in zip(buckets, costs_us, factors, spent, strict=True):
        last = max(bucket.gradients)
        if bucket.whole:
            costs.append((last, 0.0, cost_us, 0.0, slowed))
            continue
        sent_us = sum(message.time_us for message in of.messages)
        costs.append((last, of.before_us, sent_us, of.after_us, slowed))
    return costs


def bucket_costs_step_us(problem: Problem, costs: Sequence[BucketCost]) -> float:
    """Return the length of a step from its buckets' costs."""
    ready_us, delay_us = problem.ready_list_us, 0.0
    ready = [0.0] * len(costs)
    order = sorted(range(len(costs)), key=lambda index: costs[index][0])
    if problem.contended and any(of[3] > 0.0 for of in costs):
        return _unpacked_us(problem, costs, order) + problem.update_us
    for index in order:
        delay_us += costs[index][1]
        ready[index] = ready_us[costs[index][0]] + delay_us
    *ends_us, compute_us = _ends_us(problem, ready, [of[2] for of in costs], [of[4] for of in costs], delay_us)
    for end_us, of in zip(ends_us, costs, strict=True):
        if of[3] > 0.0:
            compute_us = max(compute_us, end_us) + of[3]
    return max(*ends_us, compute_us) + problem.update_us


def _unpacked_us(problem: Problem, costs: Sequence[BucketCost], order: Sequence[int]) -> float:
    """Return when everything has ended where unpacking slows messages, and is slowed by them.

    `costs` are in launch order, `order` is that of the buckets' last gradients.
    """
    ops, made, done_us = Ops(), [0] * len(costs), 0.0
    for index in order:
        last, select_us, *_ = costs[index]
        made[index] = ops.add(Op(COMPUTE, problem.ready_list_us[last] - done_us + select_us))
        done_us = problem.ready_list_us[last]
    ops.add(Op(COMPUTE, problem.compute_end_us - done_us))
    sent = [ops.add(Op(NETWORK, of[2], (made[index],), factors=of[4])) for index, of in enumerate(costs)]
    for arrived, of in zip(sent, costs, strict=True):
        if of[3] > 0.0:
            ops.add(Op(COMPUTE, of[3], (arrived,)))
    return run(ops).total_us


def exchange_timeline(problem: Problem, buckets: Sequence[Bucket], exchange: Exchange) -> Timeline:
    """Return the timeline of a step whose messages all use one network, none of selected elements."""
    contended, overlap, state = problem.contended, Overlap.of(problem), State(0.0, 0.0)
    moments, times, end_us = [state], [], 0.0
    members = [bucket.gradients for bucket in buckets]
    ready_us = [problem.ready_list_us[max(gradients)] for gradients in members]
    for ready, cost_us, factors in zip(ready_us, exchange.costs_us, problem.bucket_factors(members), strict=True):
        if contended:
            start, shared, state = overlap.send(state, ready, cost_us, factors)
            # Once backward has ended, time goes on and progress does not: its end is the first moment there.
            moments += [moment for moment in (start, shared) if moment.progress_us > moments[-1].progress_us]
            start_us, end_us = start.time_us, state.time_us
        else:
            start_us = max(end_us, ready)
            end_us = start_us + cost_us
        times.append((start_us, end_us))
    backward_end_us = problem.compute_end_us
    if contended:
        # Between two moments compute advances evenly, and after the last one at full speed.
        last = moments[-1]
        moments.append(State(last.time_us + backward_end_us - last.progress_us, backward_end_us))
        ready_us = np.interp(ready_us, [m.progress_us for m in moments], [m.time_us for m in moments]).tolist()
        backward_end_us = moments[-1].time_us
    messages = [
        Span(
            task=f"bucket {index} {collective}", resource="network", start_us=start_us, end_us=end_us, bucket=index,
            ready_us=ready,
        )
        for index, (collective, ready, (start_us, end_us)) in enumerate(
            zip(exchange.collectives, ready_us, times, strict=True)
        )
    ]  # fmt: skip
    return step_timeline(problem, messages, end_us, backward_end_us, exchange)


def step_timeline(
    problem: Problem, messages: Sequence[Span], network_end_us: float, backward_end_us: float, exchange: Exchange
) -> Timeline:
    """Return forward, backward, the messages during it, the update, and gathers one after the other."""
    forward_us, end_us = problem.forward_us, max(network_end_us, backward_end_us)
    forward = Span(task="forward", resource="compute", start_us=0.0, end_us=forward_us)
    backward = Span(task="backward", resource="compute", start_us=forward_us, end_us=backward_end_us)
    update = Span(task="update", resource="compute", start_us=end_us, end_us=end_us + exchange.update_us)
    gathers, start_us = [], update.end_us
    for index, time_us in enumerate(exchange.gathers_us):
        task = f"bucket {index} {ALL_GATHER}"
        gathers.append(Span(task=task, resource="network", start_us=start_us, end_us=start_us + time_us))
        start_us += time_us
    return Timeline(
        spans=(forward, backward, *messages, update, *gathers),
        iteration_us=end_us + exchange.end_us,
        forward_us=forward_us,
        backward_us=problem.backward_us,
        update_us=exchange.end_us,
    )
