"""`--to graphml` and `--to dot`: the step as a graph, for programs that draw graphs or work on them (networkx, Gephi,
Graphviz). Nodes are tasks with their times and slack, edges go to those that wait for them. `--to layers-graphml` and
`--to layers-dot`: the same of the model's layers, whose edges go to those that read their outputs.
"""

from __future__ import annotations

import json

from planner.emit.step_graph import StepGraph, layer_graph, plan_graph
from planner.export.base import Export
from planner.model.problem import Problem
from runtime.errors import InputError
from runtime.plan import Plan


def export_step(plan: Plan, problem: Problem | None, dot: str = "") -> Export:
    """Return the step as GraphML, or in Graphviz's language under the name `dot`. Raises InputError where the plan has
    no timeline of one step.
    """
    found = plan_graph(plan)
    if found is None:
        raise InputError(
            "$.predicted.timeline: found no timeline of one step, expected a plan by `planner optimize` whose steps do "
            "not overlap; plans with delay, late gathers or local updaters have no such graph"
        )
    note = "times are predicted, in microseconds; contention is in the times, and does not change with them"
    return _export(found, note, dot)


def export_layers(plan: Plan, problem: Problem | None, dot: str = "") -> Export:
    """Return the model's layers like `export_step`. Raises InputError where the profile is not given or has no inputs
    of them.
    """
    found = layer_graph((problem and problem.profile.layers) or ())
    if found is None:
        what = "none" if problem is None else "one without `inputs` of its layers"
        raise InputError(
            f"--profile: found {what}, expected the plan's profile with the inputs of its layers, which `planner "
            f"profile` writes; give that, or profile the job again"
        )
    all_us = sum(node.time_us for node in found.order)
    note = (
        f"times are of forward and backward; {len(found.critical_path)} of {len(found.order)} layers are on the "
        f"critical path, with {found.step_us / 1e3:.4g} of {all_us / 1e3:.4g} ms"
    )
    return _export(found, note, dot)


def _export(found: StepGraph, note: str, dot: str) -> Export:
    """Return a graph as GraphML, or in Graphviz's language under the name `dot`."""
    tasks, edges = found.attributes(), [[before.name, after.name] for before, after in found.graph.edges]
    document = {"tasks": [{"task": name, **of} for name, of in tasks.items()], "edges": edges}
    if not dot:
        return Export(text=found.graphml(), document=document, notes=(note,))
    lines = [f"digraph {dot} {{", "  rankdir=LR;", "  node [shape=box];"]
    for name, of in tasks.items():
        label = f"{name}\n{of['time_us'] / 1e3:.3g} ms, slack {of['slack_us'] / 1e3:.3g} ms"
        style = ", penwidth=3" if of["critical"] else ""
        lines.append(f"  {json.dumps(name)} [label={json.dumps(label)}{style}];")
    lines += [f"  {json.dumps(before)} -> {json.dumps(after)};" for before, after in edges]
    return Export(text="\n".join([*lines, "}"]) + "\n", document=document, notes=(note,))
