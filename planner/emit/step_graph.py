"""The tasks of a predicted step as a graph: what waits for what, how much slower each may be, and the critical path.

The graph is read from a timeline, so that any plan has one. Backward is cut where the gradients of a bucket are ready.
A task waits for the one before it on its resource, for its gradients, and for the earlier phases of its bucket; the
update waits for every bucket. The slack of a task is its total float (critical path method): made longer by less than
that, the step stays as long; by more, the step is longer by the difference. Slow-downs by contention are in the tasks'
times, and do not change with them. Graphs and their algorithms are networkx's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from planner.documents.profile import Layer
from runtime.errors import InputError
from runtime.plan import Plan

if TYPE_CHECKING:
    from networkx import DiGraph

COMPUTE = "compute"
EXACT = 1e-9
"""Relative difference of times that counts as rounding."""
HALVINGS = 50
"""Bisection steps for the slow-down that a link may have."""


class Task(Protocol):
    """A task of a timeline; `runtime.plan.timeline.Span` or `runtime.plan.predicted.PredictedTask`."""

    @property
    def task(self) -> str: ...
    @property
    def resource(self) -> str: ...
    @property
    def start_us(self) -> float: ...
    @property
    def end_us(self) -> float: ...
    @property
    def bucket(self) -> int | None: ...
    @property
    def ready_us(self) -> float | None: ...


class Node(NamedTuple):
    """One node: a task, or a part of backward."""

    name: str
    resource: str
    time_us: float
    bucket: int | None


FIRST_AND_LAST = {"forward": 0, "update": 2}
"""Order of tasks that begin and end at the same times; 1 for all others."""


@dataclass(frozen=True, eq=False)
class StepGraph:
    """The graph of one step, with its algorithms."""

    graph: DiGraph[Node]
    """Edges lead from each task to those that wait for it."""

    @cached_property
    def order(self) -> list[Node]:
        """Tasks, each after all that it waits for.

        Raises:
            InputError: tasks wait for each other.
        """
        nx = _networkx()
        if not nx.is_directed_acyclic_graph(self.graph):
            circle = " → ".join(node.name for node, _ in nx.find_cycle(self.graph))
            raise InputError(
                f"$.predicted.timeline: found tasks that wait for each other: {circle}; expected a task to begin after "
                f"those before it; make the plan again with `planner optimize`"
            )
        return list(nx.topological_sort(self.graph))

    def ends_us(self, times_us: Mapping[Node, float] | None = None) -> dict[Node, float]:
        """Return when each task ends, in microseconds; `times_us` has other durations of some of them."""
        ends_us: dict[Node, float] = {}
        for node in self.order:
            start_us = max((ends_us[before] for before in self.graph.predecessors(node)), default=0.0)
            ends_us[node] = start_us + (times_us or {}).get(node, node.time_us)
        return ends_us

    @cached_property
    def step_us(self) -> float:
        """Length of the step in microseconds."""
        return max(self.ends_us().values())

    @cached_property
    def slack_us(self) -> dict[Node, float]:
        """Time by which each task may be longer, alone, without making the step longer; microseconds."""
        latest_us: dict[Node, float] = {}
        for node in reversed(self.order):
            followers = (latest_us[after] - after.time_us for after in self.graph.successors(node))
            latest_us[node] = min(followers, default=self.step_us)
        ends_us = self.ends_us()
        # Rounding of sums is no slack.
        slack_us = {node: latest_us[node] - ends_us[node] for node in self.order}
        return {node: slack if slack > EXACT * self.step_us else 0.0 for node, slack in slack_us.items()}

    @cached_property
    def critical_path(self) -> list[Node]:
        """Tasks without a gap between them, from the start of the step to its end; the longest path."""
        weighted, end = _networkx().DiGraph(), Node("end", "", 0.0, None)
        for node in self.order:
            for after in [*self.graph.successors(node), end]:
                weighted.add_edge(node, after, weight=node.time_us)
        path: list[Node] = _networkx().dag_longest_path(weighted)
        return path[:-1]

    def bucket_slack_us(self, buckets: int) -> list[float | None]:
        """Return the slack of each bucket: the least of its messages'; None where it sends none."""
        slacks: list[list[float]] = [[] for _ in range(buckets)]
        for node, slack_us in self.slack_us.items():
            if node.bucket is not None and node.resource != COMPUTE and node.bucket < buckets:
                slacks[node.bucket].append(slack_us)
        return [min(of) if of else None for of in slacks]

    def link_slack(self) -> dict[str, float]:
        """Return by what factor all messages of each link may be longer, at once, without making the step longer."""
        return {
            link: self._factor(link)
            for link in dict.fromkeys(node.resource for node in self.order if node.time_us > 0.0)
            if link != COMPUTE
        }

    def _factor(self, link: str) -> float:
        messages = [node for node in self.order if node.resource == link]
        limit_us, longest_us = self.step_us * (1.0 + EXACT), max(node.time_us for node in messages)
        low, high = 1.0, max(1.0, 2.0 * self.step_us / longest_us)
        for _ in range(HALVINGS):
            middle = (low + high) / 2.0
            ends_us = self.ends_us({node: node.time_us * middle for node in messages})
            low, high = (middle, high) if max(ends_us.values()) <= limit_us else (low, middle)
        return low

    def attributes(self) -> dict[str, dict[str, Any]]:
        """Return by task its resource, its time and slack in microseconds, and whether it is on the critical path."""
        path = set(self.critical_path)
        return {
            node.name: {
                "resource": node.resource,
                "time_us": node.time_us,
                "slack_us": self.slack_us[node],
                "critical": node in path,
            }
            for node in self.order
        }

    def graphml(self) -> str:
        """Return the graph as GraphML, with the attributes of tasks."""
        nx = _networkx()
        written = nx.DiGraph()
        for name, attributes in self.attributes().items():
            written.add_node(name, **attributes)
        written.add_edges_from((before.name, after.name) for before, after in self.graph.edges)
        return "\n".join(nx.generate_graphml(written)) + "\n"


def _networkx() -> Any:
    import networkx  # some 0.2 s, which commands that show no graph do not spend

    return networkx


def step_graph(tasks: Sequence[Task]) -> StepGraph | None:
    """Return the graph of a step's tasks; None where steps overlap, or the tasks do not follow from each other."""
    compute = [task for task in tasks if task.resource == COMPUTE]
    named = {task.task: task for task in compute}
    if not {"forward", "backward", "update"} <= named.keys() or len(named) != len(compute):
        return None
    if any(getattr(task, "step", None) is not None or getattr(task, "tasks", None) for task in tasks):
        return None
    update, messages = named["update"], [task for task in tasks if task.resource != COMPUTE]
    parts = _backward_parts(named["backward"], tasks)
    node_of = {id(task): _node(task) for task in chain(messages, (t for t in compute if t.task != "backward"))}
    graph = _networkx().DiGraph()
    lanes: dict[str, list[tuple[float, float, Node]]] = {}
    for task in tasks:
        if task.task != "backward":
            lanes.setdefault(task.resource, []).append((task.start_us, task.end_us, node_of[id(task)]))
    lanes.setdefault(COMPUTE, []).extend(parts)
    for lane in lanes.values():
        lane.sort(key=lambda each: (*each[:2], FIRST_AND_LAST.get(each[2].name, 1)))  # some take no time at all
        graph.add_nodes_from(node for *_, node in lane)
        graph.add_edges_from(pairwise(node for *_, node in lane))
    by_bucket: dict[int, list[Task]] = {}
    for task in sorted(tasks, key=lambda each: (each.start_us, each.end_us)):
        if task.bucket is not None:
            by_bucket.setdefault(task.bucket, []).append(task)
    for of_bucket in by_bucket.values():
        first = of_bucket[0]
        ready_us = first.start_us if first.ready_us is None else first.ready_us
        before = [node for _, end_us, node in parts if end_us <= ready_us + EXACT * update.end_us]
        graph.add_edge(before[-1] if before else node_of[id(named["forward"])], node_of[id(first)])
        graph.add_edges_from(pairwise(node_of[id(task)] for task in of_bucket))
        done = [node_of[id(task)] for task in of_bucket if task.end_us <= update.start_us + EXACT * update.end_us]
        if done and done[-1] != node_of[id(update)]:
            graph.add_edge(done[-1], node_of[id(update)])
    for task in messages:
        if task.start_us >= update.end_us * (1.0 - EXACT) and task.end_us > update.end_us:
            graph.add_edge(node_of[id(update)], node_of[id(task)])
    found = StepGraph(graph)
    known_us = max(task.end_us for task in tasks)
    return found if abs(found.step_us - known_us) <= 1e-6 * known_us else None


def _node(task: Task) -> Node:
    return Node(task.task, task.resource, task.end_us - task.start_us, task.bucket)


def _backward_parts(backward: Task, tasks: Iterable[Task]) -> list[tuple[float, float, Node]]:
    """Return (start, end, node) of the parts of backward between selections and where buckets are ready."""
    inside = [
        task for task in tasks
        if task.resource == COMPUTE and task.bucket is not None and task.start_us < backward.end_us
    ]  # fmt: skip
    cuts = {task.ready_us for task in tasks if task.ready_us is not None}
    cuts |= {moment for task in inside for moment in (task.start_us, task.end_us)}
    within = sorted(cut for cut in cuts if backward.start_us < cut < backward.end_us)
    taken = [(task.start_us, task.end_us) for task in inside]
    places = [
        place for place in pairwise([backward.start_us, *within, backward.end_us])
        if not any(start_us <= place[0] and place[1] <= end_us for start_us, end_us in taken)
    ]  # fmt: skip
    return [
        (start_us, end_us, Node(f"backward part {number}", COMPUTE, end_us - start_us, None))
        for number, (start_us, end_us) in enumerate(places)
    ]


def layer_graph(layers: Iterable[Layer]) -> StepGraph | None:
    """Return a model's layers as a graph of tasks, of their kind and with the time of their forward and backward: edges
    lead to the layers that read their outputs. None where no layer has inputs.
    """
    graph, nodes = _networkx().DiGraph(), dict[str, Node]()
    for layer in layers:
        times_us = (layer.forward_us, layer.grad_input_us, layer.grad_weight_us)
        node = nodes[layer.name] = Node(layer.name or "(model)", layer.kind, sum(us or 0.0 for us in times_us), None)
        graph.add_node(node)
        graph.add_edges_from((nodes[name], node) for name in layer.inputs or ())
    return StepGraph(graph) if graph.edges else None


def plan_graph(plan: Plan) -> StepGraph | None:
    """Return the graph of a plan's predicted step; None where it has none, or its steps overlap."""
    timeline = plan.predicted.timeline if plan.predicted else None
    return step_graph(timeline) if timeline else None
