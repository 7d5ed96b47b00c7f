"""One or several training steps as a graph of tasks: for collectives of several phases, and for the critical path.

Every task runs on one resource (`compute`, and `network`, or `intra` and `inter` where a collective has phases on
both). A resource runs its tasks one at a time in a fixed order. Tasks that wait for others are edges of a networkx
graph. While compute and any network are busy at once, both are slowed by the contention factors.

With phases, each network takes its tasks sorted by bucket + phase, then bucket: while bucket 1 is being reduced between
nodes, bucket 2 is scattered inside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Literal

import networkx as nx

from planner.ir import Schedule
from planner.model.codecs import Spending
from planner.model.delay import COMPUTE as COMPUTING
from planner.model.delay import NETWORK, SPREADING, ops, resources
from planner.model.delay_load import StepWork
from planner.model.lanes import Op
from planner.model.norms import update_us
from planner.model.problem import Problem
from planner.model.spending import slowdowns, spending
from planner.model.step import Exchange
from runtime.plan.timeline import Span

COMPUTE = "compute"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    name: str
    kind: str
    """`forward`, `backward`, `update`, `sparsify`, `unpack`, or the name of a phase such as `all_reduce`; with delay
    also `pack` (waits for the bucket's last push) and `owner_update`.
    """
    resource: str
    duration_us: float
    """Alone on the machine."""
    bucket: int | None = None
    step: int = 0
    factors: tuple[float, float] | None = None
    """By what compute and this task slow each other down, where that depends on the task."""


class TaskGraph:
    def __init__(self) -> None:
        self.graph: nx.DiGraph[int] = nx.DiGraph()
        self.tasks: list[Task] = []
        self.queues: dict[str, list[int]] = {}

    def add(self, task: Task, after: Sequence[int] = ()) -> int:
        """Appends a task to its resource's queue; it begins when those in `after` have ended. Returns its number."""
        number = len(self.tasks)
        self.tasks.append(task)
        self.graph.add_node(number)
        self.graph.add_edges_from((before, number) for before in after)
        self.queues.setdefault(task.resource, []).append(number)
        return number


def build_graph(problem: Problem, schedule: Schedule, steps: int = 1, exchange: Exchange | None = None) -> TaskGraph:
    """The tasks of `steps` consecutive steps, each of which waits for its messages: of its buckets' collectives, or of
    `exchange`. Each network takes phases in order of bucket + phase.
    """
    graph, buckets = TaskGraph(), schedule.buckets
    spent_on = [spending(problem, bucket) for bucket in buckets]
    if exchange is None:
        phases, end_us = phases_of(problem, spent_on), update_us(problem, schedule)
    else:
        end_us, sent = exchange.end_us, zip(exchange.collectives, exchange.costs_us, strict=True)
        phases = [[("network", name, cost_us)] for name, cost_us in sent]
    order = sorted((index + phase, index, phase) for index, of in enumerate(phases) for phase in range(len(of)))
    closes = {max(bucket.gradients): index for index, bucket in enumerate(buckets)}
    factors: list[tuple[float, float] | None] = [None] * len(buckets)
    if problem.cost.slowdown is not None:
        by_size = slowdowns(problem, buckets, spent_on)
        # Contention by size was measured of messages that pass through all ranks.
        factors = [None if b.transport.hierarchical else of for of, b in zip(by_size, buckets, strict=True)]

    def add(step: int, name: str, kind: str, duration_us: float, after: Ends, bucket: int | None = None) -> Ends:
        task = Task(name=name, kind=kind, resource=COMPUTE, duration_us=duration_us, bucket=bucket, step=step)
        return (graph.add(task, after),)

    def select(step: int, index: int, kind: Literal["sparsify", "unpack"], after: Ends) -> Ends:
        spent = spent_on[index]
        duration_us = spent.before_us if kind == "sparsify" else spent.after_us
        return add(step, f"bucket {index} {kind}", kind, duration_us, after, index) if duration_us > 0.0 else after

    last: Ends = ()
    for step in range(steps):
        for name, duration_us in _forward(problem):
            last = add(step, name, "forward", duration_us, last)
        ready: list[Ends] = []
        for number, gradient in enumerate(problem.profile.compute.gradients):
            last = add(step, f"backward of {gradient.name}", "backward", gradient.backward_us, last)
            if number in closes:
                last = select(step, closes[number], "sparsify", last)
            ready.append(last)
        ends = [ready[max(bucket.gradients)] for bucket in buckets]
        for _, index, phase in order:
            resource, kind, duration_us = phases[index][phase]
            task = Task(
                name=f"bucket {index} {kind}", kind=kind, resource=resource, duration_us=duration_us, bucket=index,
                step=step, factors=factors[index],
            )  # fmt: skip
            ends[index] = (graph.add(task, ends[index]),)
        ends = [select(step, index, "unpack", end) for index, end in enumerate(ends)]
        last = add(step, "update", "update", end_us, (*last, *chain.from_iterable(ends)))
    return graph


def delayed_graph(problem: Problem, schedule: Schedule, k: int, steps: int) -> TaskGraph:
    """The same with delay, from an idle network; steps 0, k, 2k, … pull."""
    lanes = ops(StepWork.of(problem, schedule), k, steps)
    return graph_of_lanes(lanes, [*resources(lanes)[:SPREADING], "intra, pulled"][: len(lanes)])


def graph_of_lanes(lanes: Sequence[Sequence[Op]], names: Sequence[str]) -> TaskGraph:
    """The tasks of resources of these names; see `planner.model.lanes`."""
    graph, firsts = TaskGraph(), list(accumulate((len(lane) for lane in lanes), initial=0))
    for number, (lane, resource) in enumerate(zip(lanes, names, strict=True)):
        for op in lane:
            task = Task(
                name=f"{op.kind} {op.step}" if op.bucket is None else f"bucket {op.bucket} {op.kind}",
                kind=op.kind, resource=resource, duration_us=op.time_us, bucket=op.bucket, step=op.step,
                factors=op.factors,
            )  # fmt: skip
            on = op.on if op.on is not None else NETWORK if number == COMPUTING else COMPUTING
            graph.add(task, () if op.after < 0 else (firsts[on] + op.after,))
    return graph


Phases = list[list[tuple[str, str, float]]]
"""(resource, name, time_us) of every phase of every bucket."""

Ends = tuple[int, ...]
"""Tasks that have to have ended."""


def _forward(problem: Problem) -> Iterator[tuple[str, float]]:
    """Forward by layer where the profile knows its layers, stretched to the measured sum; else in one piece."""
    layers = [(layer.name, layer.forward_us or 0.0) for layer in problem.profile.layers or ()]
    known_us = sum(time_us for _, time_us in layers)
    if known_us <= 0.0:
        yield "forward", problem.forward_us
        return
    for name, time_us in layers:
        yield f"forward of {name}", time_us * problem.forward_us / known_us


def phases_of(problem: Problem, spent_on: Sequence[Spending]) -> Phases:
    """What each bucket's collective sends. Beside collectives with phases on both kinds of link, one of the library,
    which passes through all ranks, keeps the links between nodes busy.
    """
    phases = [[(message.resource, message.name, message.time_us) for message in spent.messages] for spent in spent_on]
    if all(resource == "network" for of in phases for resource, _, _ in of):
        return phases
    flat = "inter" if problem.cost.cluster.nodes > 1 else "intra"
    return [[(flat if resource == "network" else resource, name, us) for resource, name, us in of] for of in phases]


@dataclass(frozen=True, kw_only=True)
class Run:
    """When every task of a graph ran."""

    graph: TaskGraph
    start_us: list[float]
    end_us: list[float]

    @property
    def total_us(self) -> float:
        return max(self.end_us, default=0.0)

    def spans(self) -> list[Span]:
        spans = [
            Span(task=task.name, resource=task.resource, start_us=start_us, end_us=end_us, bucket=task.bucket)
            for task, start_us, end_us in zip(self.graph.tasks, self.start_us, self.end_us, strict=True)
        ]
        return sorted(spans, key=lambda span: span.start_us)

    def critical_path(self) -> list[int]:
        """Tasks without a gap between them from the start to the end: shortening any other one alone gains nothing."""
        waits_for = [list(self.graph.graph.predecessors(number)) for number in range(len(self.graph.tasks))]
        for queue in self.graph.queues.values():
            for before, after in pairwise(queue):
                waits_for[after].append(before)
        number = max(range(len(self.end_us)), key=lambda task: (self.end_us[task], task))
        path = [number]
        while waits_for[number]:
            number = max(waits_for[number], key=lambda task: (self.end_us[task], task))
            path.append(number)
        return path[::-1]

    def shares(self) -> dict[str, float]:
        """The critical path by kind of task: share of its length."""
        times: dict[str, float] = {}
        for number in self.critical_path():
            kind = self.graph.tasks[number].kind
            times[kind] = times.get(kind, 0.0) + self.end_us[number] - self.start_us[number]
        whole = sum(times.values())
        return {kind: time_us / whole for kind, time_us in times.items()} if whole > 0.0 else {}


def run_step(problem: Problem, graph: TaskGraph) -> Run:
    """Runs the tasks on machines whose compute and network slow each other down as the problem's do."""
    return run_graph(graph, {"compute": problem.contention.compute, "network": problem.contention.network})


def run_graph(graph: TaskGraph, slowdown: Mapping[str, float] | None = None) -> Run:
    """Run the tasks; every resource works on the first of its queue as soon as that may begin.

    `slowdown`: by what `compute`, and every `network`, is slowed while compute and a network are both busy.
    """
    factors = slowdown or {}
    state = _Running(graph, factors.get(COMPUTE, 1.0), factors.get("network", 1.0))
    while state.begin() or state.active:
        state.advance()
    if any(math.isnan(end_us) for end_us in state.end_us):
        raise ValueError("the order of tasks on the resources contradicts what they wait for")
    return Run(graph=graph, start_us=state.start_us, end_us=state.end_us)


class _Running:
    """Where all resources are at one moment."""

    def __init__(self, graph: TaskGraph, compute: float, network: float) -> None:
        self._graph, self._compute, self._network = graph, compute, network
        self._position = dict.fromkeys(graph.queues, 0)
        self._missing = [graph.graph.in_degree(number) for number in range(len(graph.tasks))]
        self._now_us = 0.0
        self.active: dict[str, tuple[int, float]] = {}
        """Resource → (task, microseconds of it that are left, alone on the machine)."""
        self.start_us = [0.0] * len(graph.tasks)
        self.end_us = [math.nan] * len(graph.tasks)

    def begin(self) -> bool:
        """Starts whatever may start now; whether anything did."""
        started = False
        for resource, queue in self._graph.queues.items():
            position = self._position[resource]
            if resource in self.active or position == len(queue) or self._missing[queue[position]]:
                continue
            number = queue[position]
            self._position[resource] += 1
            self.active[resource] = (number, self._graph.tasks[number].duration_us)
            self.start_us[number] = self._now_us
            started = True
        return started

    def advance(self) -> None:
        """On to the next moment at which a task ends."""
        both = COMPUTE in self.active and len(self.active) > 1
        factors = self._factors() if both else dict.fromkeys(self.active, 1.0)
        wall_us = {resource: left_us * factors[resource] for resource, (_, left_us) in self.active.items()}
        passed_us = min(wall_us.values())
        self._now_us += passed_us
        for resource, (number, left_us) in list(self.active.items()):
            if wall_us[resource] <= passed_us:
                self._end(resource, number)
            else:
                self.active[resource] = (number, left_us - passed_us / factors[resource])

    def _factors(self) -> dict[str, float]:
        """While compute and a network are busy; of several messages compute is slowed as by the worst."""
        of = {resource: self._graph.tasks[number].factors for resource, (number, _) in self.active.items()}
        slowed = {resource: given or (self._compute, self._network) for resource, given in of.items()}
        compute = max(factors[0] for resource, factors in slowed.items() if resource != COMPUTE)
        return {resource: compute if resource == COMPUTE else factors[1] for resource, factors in slowed.items()}

    def _end(self, resource: str, number: int) -> None:
        del self.active[resource]
        self.end_us[number] = self._now_us
        for after in self._graph.graph.successors(number):
            self._missing[after] -= 1
