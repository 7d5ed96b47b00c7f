"""`--to graphml` and `--to dot`: the step as a graph, for programs that draw graphs or work on them (networkx, Gephi,
Graphviz). Nodes are tasks with their times and slack, edges go to those that wait for them. `--to layers-graphml` and
`--to layers-dot`: the same of the model's layers, whose edges go to those that read their outputs.
"""

from __future__ import annotations

import json
from typing import Any

from planner.emit.step_graph import StepGraph, layer_graph, plan_graph
from planner.export.base import Export
from planner.model.problem import Problem
from runtime.errors import InputError
from runtime.plan import Plan

NOTES = ("times are predicted, in microseconds; contention is in the times, and does not change with them",)


def to_graphml(plan: Plan, problem: Problem | None) -> Export:
    """Return the step as GraphML. Raises InputError where the plan has no timeline of one step."""
    found = _graph(plan)
    return Export(text=found.graphml(), document=_document(found), notes=NOTES)


def to_dot(plan: Plan, problem: Problem | None) -> Export:
    """Return the step in Graphviz's language. Raises InputError where the plan has no timeline of one step."""
    found = _graph(plan)
    return Export(text=_dot(found, "step"), document=_document(found), notes=NOTES)


def layers_to_graphml(plan: Plan, problem: Problem | None) -> Export:
    """Return the model's layers as GraphML. Raises InputError where the profile is not given or has no inputs."""
    found = _layers(problem)
    return Export(text=found.graphml(), document=_document(found), notes=_branches(found))


def layers_to_dot(plan: Plan, problem: Problem | None) -> Export:
    """Return the model's layers in Graphviz's language. Raises InputError as `layers_to_graphml`."""
    found = _layers(problem)
    return Export(text=_dot(found, "layers"), document=_document(found), notes=_branches(found))


def _dot(found: StepGraph, name: str) -> str:
    lines = [f"digraph {name} {{", "  rankdir=LR;", "  node [shape=box];"]
    for task, of in found.attributes().items():
        label = f"{task}\n{of['time_us'] / 1e3:.3g} ms, slack {of['slack_us'] / 1e3:.3g} ms"
        style = ", penwidth=3" if of["critical"] else ""
        lines.append(f"  {json.dumps(task)} [label={json.dumps(label)}{style}];")
    lines += [f"  {json.dumps(before.name)} -> {json.dumps(after.name)};" for before, after in found.graph.edges]
    return "\n".join([*lines, "}"]) + "\n"


def _graph(plan: Plan) -> StepGraph:
    found = plan_graph(plan)
    if found is None:
        raise InputError(
            "$.predicted.timeline: found no timeline of one step, expected a plan by `planner optimize` whose steps do "
            "not overlap; plans with delay, late gathers or local updaters have no such graph"
        )
    return found


def _layers(problem: Problem | None) -> StepGraph:
    found = layer_graph((problem and problem.profile.layers) or ())
    if found is None:
        what = "none" if problem is None else "one without `inputs` of its layers"
        raise InputError(
            f"--profile: found {what}, expected the plan's profile with the inputs of its layers, which `planner "
            f"profile` writes; give that, or profile the job again"
        )
    return found


def _branches(found: StepGraph) -> tuple[str, ...]:
    path, all_us = found.critical_path, sum(node.time_us for node in found.order)
    return (
        f"times are of forward and backward; {len(path)} of {len(found.order)} layers are on the critical path, with "
        f"{found.step_us / 1e3:.4g} of {all_us / 1e3:.4g} ms",
    )


def _document(found: StepGraph) -> dict[str, Any]:
    edges = [[before.name, after.name] for before, after in found.graph.edges]
    return {"tasks": [{"task": name, **of} for name, of in found.attributes().items()], "edges": edges}
