"""Schedule + costs → timeline of one step: one compute resource and one network, or two, inside and between nodes.

Without contention: bucket j starts at max(end of bucket j−1, its last gradient's ready time) and takes the time of
its messages; the step ends with the later of the last bucket and backward, plus the update.

With contention factors, while both resources are busy compute advances at 1/compute and the network at 1/network of
its speed; the factors are the message's where they were measured by size. Collectives of several phases keep two
networks busy, and a bucket of selected elements keeps compute busy with its selection when it is ready, which delays
the rest of backward, and with its unpacking at the end: `planner.model.taskgraph` runs those. With delay, messages of a
step go on beside the next ones: `planner.model.delay` finds the mean step. With local updaters a step is what a rank
takes for a minibatch (`planner.model.local_async`). All times in microseconds from the start of forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from planner.cost.phases import PHASES
from planner.cost.sparse import FLAT_GATHERS
from planner.ir import Bucket, Places, Schedule
from planner.model.delay import PULL, PUSH, delayed_step_us, simulate_delayed
from planner.model.local_async import async_step_us, simulate_updaters
from planner.model.norms import update_us
from planner.model.problem import Factors, Problem
from planner.model.sharded_step import gathers_us, message_costs_us, own_update_us
from runtime.plan.timeline import Span, Timeline


class State(NamedTuple):
    """A moment of the step."""

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
    """The factors of buckets [start, stop), where they depend on the bucket; `compute` and `network` are the least."""

    @classmethod
    def of(cls, problem: Problem) -> Overlap:
        """As the problem's machines were measured."""
        slowdown, end_us = problem.cost.slowdown, problem.compute_end_us
        if slowdown is None:
            return cls(problem.contention.compute, problem.contention.network, end_us)
        return cls(*slowdown.least, end_us, problem.range_factors)

    def factors(self, starts: Places, stops: Places) -> tuple[Factors, Factors]:
        """(compute, network) beside buckets [start, stop): one for all, or one for each."""
        return (self.compute, self.network) if self.by_range is None else self.by_range(starts, stops)

    def send(
        self, free: State, ready_us: float, cost_us: float, factors: tuple[float, float]
    ) -> tuple[State, State, State]:
        """Sends one bucket.

        Args:
            free: when the network is free.
            ready_us: compute progress at which the bucket's last gradient is ready.
            cost_us: its time on an idle machine.
            factors: (compute, network) while it is on its way.

        Returns:
            The start, the end of the time that compute and network share, and the end.
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


def simulate_schedule(problem: Problem, schedule: Schedule) -> Timeline:
    """The timeline of one step of `schedule`; with delay of one cycle of steps, and the mean of them."""
    if schedule.delay is not None:
        return simulate_delayed(problem, schedule)
    if schedule.updaters is not None:
        return simulate_updaters(problem, schedule)
    if any(bucket.collective == "sparse" or (bucket.collective, bucket.algorithm) in PHASES
           for bucket in schedule.buckets):  # fmt: skip
        return _simulate_phases(problem, schedule)
    if not problem.contended:
        return _simulate_free(problem, schedule)
    return _simulate_contended(problem, schedule, Overlap.of(problem))


def step_us(problem: Problem, schedule: Schedule) -> float:
    """`simulate_schedule(…).iteration_us`, without the timeline that comparing schedules has no use for."""
    if schedule.delay is not None:
        return delayed_step_us(problem, schedule)
    if schedule.updaters is not None:
        return async_step_us(problem, schedule)
    updating_us = update_us(problem, schedule)
    if any((bucket.collective, bucket.algorithm) in PHASES for bucket in schedule.buckets):
        return _simulate_phases(problem, schedule).iteration_us
    if any(bucket.collective == "sparse" for bucket in schedule.buckets):
        sparse_us = _sparse_step_us(problem, schedule)
        return sparse_us if schedule.norms is None else sparse_us - problem.update_us + updating_us
    ready_us = problem.ready_list_us
    buckets = [bucket.gradients for bucket in schedule.buckets]
    ready = [ready_us[max(gradients)] for gradients in buckets]
    costs_us = message_costs_us(problem, schedule)
    ends_us = _ends_us(problem, ready, costs_us, problem.bucket_factors(buckets), 0.0)
    return max(ends_us) + updating_us


def _ends_us(
    problem: Problem,
    ready_us: Sequence[float],
    costs_us: Sequence[float],
    factors: Sequence[tuple[float, float]],
    selection_us: float,
) -> list[float]:
    """When each bucket ends, then when compute does; `selection_us` is what backward is longer by."""
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


Facts = tuple[int, float, float, float, tuple[float, float]]
"""Of a bucket: its last gradient, its selection, its message and its unpacking in microseconds, and its factors."""


def bucket_facts(problem: Problem, buckets: Sequence[Bucket]) -> list[Facts]:
    """What the step's length follows from, for library all-reduces and flat gathers of selected elements."""
    members = [bucket.gradients for bucket in buckets]
    costs_us, factors = problem.bucket_cost_us(members), problem.factors_of(buckets)
    facts: list[Facts] = []
    for bucket, cost_us, slowed in zip(buckets, costs_us, factors, strict=True):
        last = max(bucket.gradients)
        if bucket.collective != "sparse":
            facts.append((last, 0.0, cost_us, 0.0, slowed))
            continue
        sent_us = sum(time_us for _, _, time_us in problem.phase_times(bucket))
        select_us, unpack_us = problem.selection_us(bucket), problem.selection_us(bucket, "unpack")
        facts.append((last, select_us, sent_us, unpack_us, slowed))
    return facts


def facts_step_us(problem: Problem, facts: Sequence[Facts]) -> float:
    """As `step_us`, from facts."""
    ready_us, delay_us = problem.ready_list_us, 0.0
    ready = [0.0] * len(facts)
    order = sorted(range(len(facts)), key=lambda index: facts[index][0])
    if problem.contended and any(of[3] > 0.0 for of in facts):
        return _replay_us(problem, facts, order) + problem.update_us
    for index in order:
        delay_us += facts[index][1]
        ready[index] = ready_us[facts[index][0]] + delay_us
    *ends_us, compute_us = _ends_us(problem, ready, [of[2] for of in facts], [of[4] for of in facts], delay_us)
    for end_us, of in zip(ends_us, facts, strict=True):
        if of[3] > 0.0:
            compute_us = max(compute_us, end_us) + of[3]
    return max(*ends_us, compute_us) + problem.update_us


def _replay_us(problem: Problem, facts: Sequence[Facts], order: Sequence[int]) -> float:
    """When all has ended, from event to event: what is unpacked slows messages, and is slowed by them, too.

    Args:
        problem: the step.
        facts: of each bucket, in launch order.
        order: the buckets, sorted by their last gradients.
    """
    compute: list[tuple[float, int]] = []
    """(time, the bucket that has to have arrived), in order."""
    made, done_us = [0] * len(facts), 0.0
    for index in order:
        ready_us = problem.ready_list_us[facts[index][0]]
        made[index] = len(compute)
        compute.append((ready_us - done_us + facts[index][1], -1))
        done_us = ready_us
    compute.append((problem.compute_end_us - done_us, -1))
    compute += [(of[3], index) for index, of in enumerate(facts) if of[3] > 0.0]
    now_us, task, message, task_us, message_us = 0.0, 0, 0, compute[0][0], facts[0][2]
    while task < len(compute) or message < len(facts):
        computing = task < len(compute) and compute[task][1] < message
        sending = message < len(facts) and made[message] < task
        slow_task, slow_message = facts[message][4] if computing and sending else (1.0, 1.0)
        task_left_us = task_us * slow_task if computing else math.inf
        message_left_us = message_us * slow_message if sending else math.inf
        passed_us = min(task_left_us, message_left_us)
        now_us += passed_us
        task_us -= passed_us / slow_task if computing else 0.0
        message_us -= passed_us / slow_message if sending else 0.0
        if task_left_us <= passed_us:
            task += 1
            task_us = compute[task][0] if task < len(compute) else 0.0
        if message_left_us <= passed_us:
            message += 1
            message_us = facts[message][2] if message < len(facts) else 0.0
    return now_us


def _sparse_step_us(problem: Problem, schedule: Schedule) -> float:
    """As `step_us`, where buckets of selected elements keep compute busy."""
    if any(bucket.algorithm not in ("library", *FLAT_GATHERS) for bucket in schedule.buckets):
        return _simulate_phases(problem, schedule).iteration_us
    return facts_step_us(problem, bucket_facts(problem, schedule.buckets))


def _tasks(problem: Problem, schedule: Schedule) -> list[tuple[str, float, float]]:
    """(name, ready, cost) of each bucket."""
    buckets = [bucket.gradients for bucket in schedule.buckets]
    ready_us = problem.ready_us.tolist()
    return [
        (f"bucket {index} {_name(schedule, index)}", ready_us[max(gradients)], cost_us)
        for index, (gradients, cost_us) in enumerate(zip(buckets, message_costs_us(problem, schedule), strict=True))
    ]


def _name(schedule: Schedule, index: int) -> str:
    return PUSH if schedule.sharded else schedule.buckets[index].collective


def _simulate_free(problem: Problem, schedule: Schedule) -> Timeline:
    spans: list[Span] = []
    end_us = 0.0
    for index, (name, ready_us, cost_us) in enumerate(_tasks(problem, schedule)):
        start_us = max(end_us, ready_us)
        end_us = start_us + cost_us
        spans.append(_sent(index, name, ready_us, start_us, end_us))
    return _timeline(problem, schedule, spans, end_us, problem.compute_end_us)


def _simulate_contended(problem: Problem, schedule: Schedule, overlap: Overlap) -> Timeline:
    state = State(0.0, 0.0)
    moments = [state]
    sent: list[tuple[int, str, float, State, State]] = []
    factors = problem.bucket_factors([bucket.gradients for bucket in schedule.buckets])
    for index, (name, ready_us, cost_us) in enumerate(_tasks(problem, schedule)):
        start, shared, state = overlap.send(state, ready_us, cost_us, factors[index])
        # Once backward has ended, time goes on and progress does not: its end is the first moment there.
        moments += [moment for moment in (start, shared) if moment.progress_us > moments[-1].progress_us]
        sent.append((index, name, ready_us, start, state))
    # Between two moments compute advances evenly, and after the last one at full speed.
    last = moments[-1]
    moments.append(State(last.time_us + problem.compute_end_us - last.progress_us, problem.compute_end_us))
    progress_us, time_us = [m.progress_us for m in moments], [m.time_us for m in moments]
    ready_wall_us = np.interp([ready for _, _, ready, _, _ in sent], progress_us, time_us).tolist()
    spans = [
        _sent(index, name, ready_us, start.time_us, end.time_us)
        for (index, name, _, start, end), ready_us in zip(sent, ready_wall_us, strict=True)
    ]
    return _timeline(problem, schedule, spans, state.time_us, moments[-1].time_us)


def _simulate_phases(problem: Problem, schedule: Schedule) -> Timeline:
    from planner.model.taskgraph import build_graph, run_graph  # networkx, which most commands do not need

    factors = problem.contention
    run = run_graph(build_graph(problem, schedule), {"compute": factors.compute, "network": factors.network})
    tasks = list(zip(run.graph.tasks, run.start_us, run.end_us, strict=True))
    gradients_end_us = [end_us for task, _, end_us in tasks if task.kind == "backward"]
    ready_us = [gradients_end_us[max(bucket.gradients)] for bucket in schedule.buckets]
    messages = [
        Span(
            task=task.name, resource=task.resource, start_us=start, end_us=end, bucket=task.bucket,
            ready_us=ready_us[task.bucket],
        )
        for task, start, end in tasks
        if task.bucket is not None
    ]  # fmt: skip
    messages.sort(key=lambda span: span.start_us)
    network_end_us = max((span.end_us for span in messages), default=0.0)
    return _timeline(problem, schedule, messages, network_end_us, gradients_end_us[-1])


def _gathers(problem: Problem, schedule: Schedule, start_us: float) -> Iterator[Span]:
    """Of the weights that ranks have updated, one after the other."""
    for index, time_us in enumerate(gathers_us(problem, schedule.buckets) if schedule.sharded else ()):
        yield Span(task=f"bucket {index} {PULL}", resource="network", start_us=start_us, end_us=start_us + time_us)
        start_us += time_us


def _sent(index: int, name: str, ready_us: float, start_us: float, end_us: float) -> Span:
    return Span(task=name, resource="network", start_us=start_us, end_us=end_us, bucket=index, ready_us=ready_us)


def _timeline(
    problem: Problem, schedule: Schedule, network: list[Span], network_end_us: float, backward_end_us: float
) -> Timeline:
    forward_us, end_us = problem.forward_us, max(network_end_us, backward_end_us)
    updating_us = update_us(problem, schedule)
    iteration_us = end_us + updating_us
    forward = Span(task="forward", resource="compute", start_us=0.0, end_us=forward_us)
    backward = Span(task="backward", resource="compute", start_us=forward_us, end_us=backward_end_us)
    updated_us = end_us + own_update_us(problem) if schedule.sharded else iteration_us
    update = Span(task="update", resource="compute", start_us=end_us, end_us=updated_us)
    return Timeline(
        spans=(forward, backward, *network, update, *_gathers(problem, schedule, updated_us)),
        iteration_us=iteration_us,
        forward_us=forward_us,
        backward_us=problem.backward_us,
        update_us=updating_us,
    )
