"""`--to graphml` and `--to dot`: the step as a graph, for programs that draw graphs or work on them (networkx, Gephi,
Graphviz). Nodes are tasks with their times and slack, edges go to those that wait for them.
"""

from __future__ import annotations

import json
from typing import Any

from planner.emit.step_graph import StepGraph, plan_graph
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
    lines = ["digraph step {", "  rankdir=LR;", "  node [shape=box];"]
    for name, of in found.attributes().items():
        label = f"{name}\n{of['time_us'] / 1e3:.3g} ms, slack {of['slack_us'] / 1e3:.3g} ms"
        style = ", penwidth=3" if of["critical"] else ""
        lines.append(f"  {json.dumps(name)} [label={json.dumps(label)}{style}];")
    lines += [f"  {json.dumps(before.name)} -> {json.dumps(after.name)};" for before, after in found.graph.edges]
    return Export(text="\n".join([*lines, "}"]) + "\n", document=_document(found), notes=NOTES)


def _graph(plan: Plan) -> StepGraph:
    found = plan_graph(plan)
    if found is None:
        raise InputError(
            "$.predicted.timeline: found no timeline of one step, expected a plan by `planner optimize` whose steps do "
            "not overlap; plans with delay, late gathers or local updaters have no such graph"
        )
    return found


def _document(found: StepGraph) -> dict[str, Any]:
    edges = [[before.name, after.name] for before, after in found.graph.edges]
    return {"tasks": [{"task": name, **of} for name, of in found.attributes().items()], "edges": edges}
