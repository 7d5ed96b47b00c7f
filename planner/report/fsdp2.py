"""A plan for FSDP2 on the terminal: its groups, what users have instead, and time over memory."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from planner.documents.text import SENTENCE_CHARACTERS, mebibytes, milliseconds, pluralize, sanitize
from planner.fsdp2.decide import wrapping_rows
from planner.report.tables import certificate_text, make_table, print_table
from runtime.plan import FullyShardPlan, Plan


def print_wrapping(plan: Plan, console: Console, *, groups: bool) -> None:
    """Summary, time over memory, certificate and notes; with `groups` every group and where the numbers came from."""
    spec = plan.fsdp2
    assert spec is not None
    print_table(console, summary_table(plan, spec))
    if groups:
        print_table(console, group_table(spec))
    if spec.frontier:
        print_table(console, memory_table(spec))
    memory = f"predicted peak {mebibytes(spec.peak_bytes)} a rank" if spec.peak_bytes is not None else ""
    if memory and spec.memory_bytes is not None:
        memory += f", limit {mebibytes(spec.memory_bytes)}"
    for line in filter(None, (memory, mesh_line(plan, spec), certificate_text(plan))):
        console.print(line, highlight=False)
    for note in plan.notes:
        console.print(f"- {sanitize(note, SENTENCE_CHARACTERS)}", highlight=False)
    if groups:
        for name, text in (plan.sources or {}).items():
            console.print(f"{sanitize(name)}: {sanitize(text, SENTENCE_CHARACTERS)}", highlight=False)


def mesh_line(plan: Plan, spec: FullyShardPlan) -> str:
    """Which mesh the plan is for, and how many reduce-scatters may be under way."""
    shard = spec.shard_size(plan.world.ranks)
    copies = plan.world.ranks // shard
    text = f"mesh ({shard},)" if copies == 1 else f"mesh ({copies}, {shard}): {pluralize(copies, 'copy')} of the model"
    text = text.replace("copys", "copies")
    buffers = spec.reduce_scatter_max_input_buffers
    return text if buffers is None else f"{text}; {pluralize(buffers, 'reduce-scatter')} under way"


def summary_table(plan: Plan, spec: FullyShardPlan) -> Table:
    """The plan and what users have instead, from fast to slow."""
    columns = ("wrapping", "groups", "step (ms)", "exposed (ms)", "step / plan")
    title = f"{sanitize(plan.model.name)}, {pluralize(plan.world.ranks, 'rank')}, FSDP2: predicted time of one step"
    table = make_table(title, columns, left=("wrapping",))
    base_us = plan.predicted.iteration_us if plan.predicted else 0.0
    rows = [("plan", plan.predicted)] if plan.predicted else []
    rows += sorted((plan.baselines or {}).items(), key=lambda item: item[1].iteration_us)
    for name, step in rows:
        count = len(spec.groups) if name == "plan" and step.buckets is None else step.buckets
        ratio = f"{step.iteration_us / base_us:.3f}" if base_us > 0.0 else ""
        groups = "" if count is None else str(count)
        table.add_row(sanitize(name), groups, milliseconds(step.iteration_us), milliseconds(step.exposed_us), ratio)
    return table


def group_table(spec: FullyShardPlan) -> Table:
    """Every group."""
    columns = ("group", "after forward", "fetched ahead in forward", "in backward")
    table = make_table("groups in the order of forward", columns, left=columns)
    for row in wrapping_rows(spec):
        table.add_row(*map(sanitize, row))
    return table


def memory_table(spec: FullyShardPlan) -> Table:
    """Time over memory."""
    table = make_table("time over memory, of the wrappings looked at", ("peak", "groups", "kept", "step (ms)"))
    for point in spec.frontier or ():
        step = milliseconds(point.iteration_us)
        table.add_row(mebibytes(point.peak_bytes), str(point.groups), str(point.kept), step)
    return table
