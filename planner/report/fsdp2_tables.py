"""A plan for FSDP2 in tables and lines: its groups, what users have instead, and time over memory."""

from __future__ import annotations

from collections.abc import Iterator

from planner.documents.text import mebibytes, milliseconds, pluralize, sanitize
from planner.report.listing import Listing, step_rows
from runtime.plan import FullyShardPlan, Plan
from runtime.plan.fully_sharded import ROOT


def wrapping_listings(plan: Plan, spec: FullyShardPlan, *, groups: bool) -> Iterator[Listing]:
    """Give the plan and what users have instead; with `groups` every group; and time over memory."""
    title = f"{sanitize(plan.model.name)}, {pluralize(plan.world.ranks, 'rank')}, FSDP2: predicted time of one step"
    columns: tuple[str, ...] = ("wrapping", "groups", "step (ms)", "exposed (ms)", "step / plan")
    said = plan.predicted.buckets if plan.predicted else None
    steps = step_rows(plan, "plan", len(spec.groups) if said is None else said)
    yield Listing(title, columns, [(sanitize(name), *cells) for name, *cells in steps], left=("wrapping",))
    if groups:
        columns = ("group", "after forward", "fetched ahead in forward", "in backward")
        rows = [tuple(map(sanitize, row)) for row in _group_rows(spec)]
        yield Listing("groups in the order of forward", columns, rows, left=columns)
    if spec.frontier:
        columns = ("peak", "groups", "kept", "step (ms)")
        rows = [
            (mebibytes(point.peak_bytes), str(point.groups), str(point.kept), milliseconds(point.iteration_us))
            for point in spec.frontier
        ]
        yield Listing("time over memory, of the wrappings looked at", columns, rows)


def _group_rows(plan: FullyShardPlan) -> list[tuple[str, str, str, str]]:
    """Return a row for each group: modules, after forward, fetched ahead in forward and in backward."""
    rows = []
    for group in (*plan.groups, (ROOT,)):
        name = group[0]
        reshard = plan.reshard_after_forward.get(name, name != ROOT)
        after = "freed" if reshard is True else "kept" if reshard is False else f"kept in {reshard} parts"
        modules = (group[0] or "the model itself") if len(group) == 1 else f"{group[0]} … {group[-1]} ({len(group)})"
        rows.append((
            modules, after, ", ".join(plan.forward_prefetch.get(name, ())),
            ", ".join(plan.backward_prefetch.get(name, ())),
        ))  # fmt: skip
    return rows


def wrapping_lines(plan: Plan, spec: FullyShardPlan) -> list[str]:
    """Return the predicted memory, which mesh the plan is for, and how many reduce-scatters may be under way."""
    memory = f"predicted peak {mebibytes(spec.peak_bytes)} a rank" if spec.peak_bytes is not None else ""
    if memory and spec.memory_bytes is not None:
        memory += f", limit {mebibytes(spec.memory_bytes)}"
    shard = spec.shard_size(plan.world.ranks)
    copies = plan.world.ranks // shard
    mesh = f"mesh ({shard},)" if copies == 1 else f"mesh ({copies}, {shard}): {copies} copies of the model"
    if (buffers := spec.reduce_scatter_max_input_buffers) is not None:
        mesh += f"; {pluralize(buffers, 'reduce-scatter')} under way"
    return [memory, mesh]
