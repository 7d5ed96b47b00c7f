"""`planner optimize --parallel fsdp2`: a profile and a cluster in, a plan for `planner.fully_shard` out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from planner.documents.accelerators import ROOM, check_memory
from planner.documents.profile import DTYPE_BYTES, Cluster, Profile
from planner.documents.text import mib
from planner.emit.sources import describe_sources
from planner.fsdp2.inputs import NARROW, PER_BLOCK, Setting, baselines_of, make_setting
from planner.fsdp2.program import FORWARD, GATHER, REDUCE, Shape
from planner.fsdp2.search import Ahead, Choice, Found, Wrappings, least_memory, search
from planner.fsdp2.simulator import COMPUTE, LANES, Step, simulate
from planner.ir import ACCURACIES, GAIN
from runtime.errors import InputError
from runtime.plan import Accuracy, FullyShardPlan, Plan, PlanWorld
from runtime.plan.fully_sharded import MemoryPoint
from runtime.plan.predicted import Certificate, PredictedTask, Prediction

FRONTIER = 12
"""Points of time over memory."""
MARGIN = 0.005
"""Share of a memory limit that is left free: allocators round up, and optimizers count steps, unlike predictions."""
WORDS = {GATHER: "all-gather", "reduce_scatter": "reduce-scatter", REDUCE: "all-reduce"}


@dataclass(frozen=True, kw_only=True)
class WrappingRequest:
    """Request for a plan for FSDP2."""

    profile: Profile | str | Path
    """A profile with `units`, as `planner profile --parallel fsdp2` measures them; without, blocks are made of the
    names of its gradients.
    """
    cluster: Cluster | str | Path | None = None
    """The cluster, as for `optimize`; default: the one measured with the profile."""
    accuracy: Accuracy = "exact"
    """The riskiest class; from bounded on gradients may be added up in bfloat16 on accelerators."""
    max_memory_mib: float | None = None
    """Memory of each rank for everything; default: the accelerator's, as profiled, if known."""
    ranks: int | None = None
    """Default: the cluster's."""


def optimize_wrapping(request: WrappingRequest) -> Plan:
    """Decide groups, prefetches and kept parameters of a model under FSDP2, and its mesh.

    Raises InputError: a document is wrong; no wrapping takes as little memory as the limit (says the least that one
        does).
    """
    if request.accuracy not in ACCURACIES:
        raise InputError(f"accuracy: found {request.accuracy!r}, expected one of: {', '.join(ACCURACIES)}")
    setting = make_setting(request.profile, request.cluster, request.ranks)
    # On hosts reduce-scatters whose result is cast are waited for at once.
    may_round = request.accuracy != "exact" and setting.executor == "accelerator"
    if not may_round or setting.units.element_bytes <= DTYPE_BYTES[NARROW]:
        return plan_for(setting, request.max_memory_mib)
    narrow = plan_for(replace(setting, narrow=True), request.max_memory_mib)
    assert narrow.fsdp2 is not None
    assert narrow.predicted is not None
    narrow_us = narrow.predicted.iteration_us
    narrow = replace(narrow, accuracy="bounded", fsdp2=replace(narrow.fsdp2, reduce_dtype=NARROW))
    rounds = f"gradients are added up in {NARROW}, which rounds them"
    try:
        plan = plan_for(setting, request.max_memory_mib)
    except InputError as error:
        return replace(narrow, notes=(*narrow.notes, f"{rounds}; without, {error}"))
    assert plan.predicted is not None
    if narrow_us > (1.0 - GAIN) * plan.predicted.iteration_us:
        return replace(plan, notes=(*plan.notes, f"to add gradients up in {NARROW} would gain less than {GAIN:.0%}"))
    exact_ms = plan.predicted.iteration_us / 1e3
    notes = (*narrow.notes, f"{rounds}; without, {exact_ms:.2f} ms")
    return replace(narrow, baselines=plan.baselines, notes=notes)


def plan_for(setting: Setting, max_memory_mib: float | None = None) -> Plan:
    """Decide as `optimize_wrapping`, on what is known already, in one dtype."""
    asked = _limit(setting, check_memory(max_memory_mib))
    limit = None if asked is None else int((1.0 - MARGIN) * asked)
    shards: list[int | None] = [None]
    machines = setting.problem.cost.cluster
    if machines.nodes > 1 and machines.ranks_per_node > 1:
        shards.append(machines.ranks_per_node)
    tried: list[tuple[Wrappings, Found]] = []
    least: list[tuple[FullyShardPlan, int]] = []
    for shard in shards:
        try:
            costs = setting.costs(shard)
            in_parts = shard is None and costs.gather_inside_us is not None
            wrappings = Wrappings(
                setting.shape, costs, setting.executor, shard, machines.ranks_per_node if in_parts else None
            )
        except InputError:
            if shard is None:
                raise
            continue  # what copies' messages cost is not known on this cluster
        plan, point = least_memory(wrappings)
        least.append((plan, point.peak_bytes))
        found = search(wrappings, limit)
        if found is not None:
            tried.append((wrappings, found))
        elif limit is not None and point.peak_bytes <= limit:  # with the root freed as well
            step = simulate(setting.shape, plan, wrappings.costs, setting.executor)
            tried.append((wrappings, Found(plan=plan, step=step, bound_us=0.0, exact=False)))
    if not tried:
        needed = math.ceil(min(size for _, size in least) / (1.0 - MARGIN))
        raise InputError(_cannot(setting, asked, needed, max_memory_mib))
    wrappings, found = min(tried, key=lambda one: (one[1].step.iteration_us, one[1].step.peak_bytes))
    usual, costs = baselines_of(setting), setting.costs(None)
    baselines = {name: simulate(setting.shape, plan, costs, setting.executor) for name, plan in usual.items()}
    for name, plan in usual.items():  # the root's part in them is of no wrapping that was searched
        step = baselines[name]
        if step.iteration_us < found.step.iteration_us and (limit is None or step.peak_bytes <= limit):
            found = replace(found, plan=plan, step=step, exact=False, bound_us=min(found.bound_us, step.iteration_us))
    return _plan(setting, wrappings, found, baselines, asked, [one for one, _ in tried])


def _limit(setting: Setting, max_memory_mib: float | None) -> int | None:
    if max_memory_mib is not None:
        return int(max_memory_mib * 2**20)
    known = setting.problem.profile.world.memory_bytes
    return None if known is None else int(ROOM * known)


def _cannot(setting: Setting, limit: int | None, least: int, asked: float | None) -> str:
    where = "--max-memory-mib" if asked is not None else "the accelerator's memory"
    return (
        f"{where}: found {mib(limit or 0)}, expected at least {mib(least)}, which the smallest wrapping takes on "
        f"{setting.ranks} ranks: allow that, use more ranks, or compute blocks twice (checkpointing)"
    )


def _plan(
    setting: Setting, wrappings: Wrappings, found: Found, baselines: Mapping[str, Step], limit: int | None,
    searched: Sequence[Wrappings],
) -> Plan:  # fmt: skip
    problem, step = setting.problem, found.step
    lost_us = None
    if found.plan.reduce_scatter_max_input_buffers:
        single = replace(found.plan, reduce_scatter_max_input_buffers=None)
        costs = setting.costs(found.plan.shard_ranks)
        lost_us = simulate(setting.shape, single, costs, setting.executor, bars=False).iteration_us - step.iteration_us
    spec = replace(
        found.plan, peak_bytes=step.peak_bytes, memory_bytes=limit,
        lost_without_buffers_us=None if lost_us is None else round(max(0.0, lost_us), 3),
        frontier=_frontier(searched, found),
    )  # fmt: skip
    method = "every wrapping decided on, by branch and bound" if found.exact else "search from runs of equal length"
    gap = step.iteration_us / found.bound_us - 1.0 if found.bound_us > 0.0 else 0.0
    world = problem.profile.world
    return Plan(
        model=problem.profile.model,
        world=PlanWorld(ranks=setting.ranks, nodes=problem.cost.cluster.nodes, torch=world.torch),
        accuracy="exact",
        buckets=(),
        fsdp2=spec,
        predicted=prediction(setting.shape, step, timeline=True),
        baselines={name: prediction(setting.shape, one) for name, one in baselines.items()},
        certificate=Certificate(
            method=method, lower_bound_us=found.bound_us, gap=max(0.0, gap),
            note="among groups of consecutive units, fetched equally far ahead",
        ),
        sources=describe_sources(problem),
        notes=tuple(_notes(setting, found, baselines, limit)),
    )  # fmt: skip


def prediction(shape: Shape, step: Step, *, timeline: bool = False) -> Prediction:
    """Return a step as plans hold it; `timeline`: with every message and computation."""
    forward_us = sum(leaf.forward_us for leaf in shape.leaves)
    return Prediction(
        iteration_us=step.iteration_us, forward_us=forward_us, backward_us=step.compute_us - forward_us,
        update_us=step.update_us, exposed_us=step.exposed_us,
        buckets=len({bar.group for bar in step.bars if bar.group >= 0}),
        timeline=tuple(_task(shape, step, index) for index in range(len(step.bars))) if timeline else None,
    )  # fmt: skip


def _task(shape: Shape, step: Step, index: int) -> PredictedTask:
    bar = step.bars[index]
    if bar.lane == COMPUTE:
        way = "forward" if bar.kind == FORWARD else "backward"
        name = f"{way} {shape.leaves[bar.leaf].module}"
    else:
        name = f"{WORDS[bar.kind]} {step.groups[bar.group] or 'model'}"
    return PredictedTask(
        task=name, resource=LANES[bar.lane], start_us=round(bar.start_us, 3), end_us=round(bar.end_us, 3),
        size_bytes=bar.size_bytes or None,
    )  # fmt: skip


def _frontier(searched: Sequence[Wrappings], found: Found) -> tuple[MemoryPoint, ...]:
    """Return the wrappings looked at that no smaller one is as fast as, thinned out evenly."""
    points: list[tuple[int, float, int, int]] = [(
        found.step.peak_bytes, found.step.iteration_us, len(found.plan.groups),
        sum(value is False for value in found.plan.reshard_after_forward.values()),
    )]  # fmt: skip
    for wrappings in searched:
        alone = tuple(range(len(wrappings.units)))
        for kept in range(len(alone) + 1):
            wrappings.point(Choice(alone, frozenset(alone[len(alone) - kept :]), Ahead()))
        points += [
            (point.peak_bytes, point.iteration_us, len(choice.starts), len(choice.kept))
            for choice, point in wrappings.known.items()
        ]
    best: list[tuple[int, float, int, int]] = []
    for one in sorted(points):
        if not best or one[1] < best[-1][1]:
            best.append(one)
    step = max(1, -(-len(best) // FRONTIER))
    thin = sorted({*best[::step], best[-1]})
    return tuple(
        MemoryPoint(peak_bytes=peak, iteration_us=round(time_us, 3), groups=groups, kept=kept)
        for peak, time_us, groups, kept in thin
    )


def _notes(setting: Setting, found: Found, baselines: Mapping[str, Step], limit: int | None) -> list[str]:
    notes = []
    best = min(baselines, key=lambda name: baselines[name].iteration_us)
    gain = 1.0 - found.step.iteration_us / baselines[PER_BLOCK].iteration_us
    notes.append(
        f"{gain:.1%} shorter than a group for each block with FSDP2's own rules"
        if gain >= 0.01
        else f"nothing to gain: {gain:.1%} shorter than a group for each block with FSDP2's own rules"
    )
    notes.append(f"the fastest of what users have instead is {best}")
    if limit is not None:
        over = [f"{name} ({mib(step.peak_bytes)})" for name, step in baselines.items() if step.peak_bytes > limit]
        notes.append(f"limit {mib(limit)}" + (f"; above it: {', '.join(over)}" if over else ""))
    if found.plan.shard_ranks is not None:
        notes.append("a copy of the model in every node (HSDP): not rehearsed, on hosts its all-reduces block")
    if setting.units.estimated:
        notes.append("units are blocks by gradients' names, and their times shared out; `planner profile --parallel "
                     "fsdp2` measures them")  # fmt: skip
    if not any(unit.activation_bytes for unit in setting.units.units):
        notes.append("activations are not known, and not in the predicted memory")
    if setting.executor == "hosts":
        notes.append("for hosts without accelerators, where messages go on beside computation by overlap_on_hosts")
    return notes
