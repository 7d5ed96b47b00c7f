"""`planner optimize --parallel fsdp2`: a profile and a cluster in, a plan for `planner.fully_shard` out."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Literal

from planner.cost.curve import CostCurve
from planner.cost.halves import ALL_GATHER, REDUCE_SCATTER
from planner.cost.phases import measured_curve
from planner.documents.accelerators import ROOM, check_memory
from planner.documents.catalog import find_cluster, find_profile, name_of
from planner.documents.profile import DTYPE_BYTES, Cluster, Profile
from planner.documents.text import mib
from planner.documents.units import Unit, Units, UnitWeight
from planner.emit.sources import describe_sources
from planner.fsdp2.costs import SLOWDOWN, message_costs
from planner.fsdp2.program import FORWARD, GATHER, REDUCE, Shape
from planner.fsdp2.search import Ahead, Choice, Found, Wrappings, least_memory, search, with_ahead
from planner.fsdp2.simulator import COMPUTE, LANES, Cost, Costs, Executor, Step, simulate
from planner.ir import ACCURACIES
from planner.model.problem import Problem, make_problem
from planner.passes.base import GAIN
from runtime.errors import InputError
from runtime.plan import Accuracy, FullyShardPlan, Plan, PlanWorld
from runtime.plan.fully_sharded import ROOT, MemoryPoint
from runtime.plan.predicted import Certificate, PredictedTask, Prediction

LIBRARY_GATHER, LIBRARY_SCATTER = f"library/{ALL_GATHER}", f"library/{REDUCE_SCATTER}"
"""Keys of a cluster's samples: the library's own collectives, which FSDP2 calls."""
PER_BLOCK, ONE_UNIT, TITAN = "per_block", "one_unit", "torchtitan"
FRONTIER = 12
"""Points of time over memory."""
MARGIN = 0.005
"""Of a limit, what is left free: allocators round up, and optimizers count steps; predicted peaks say nothing of it."""
NARROW: Literal["bfloat16"] = "bfloat16"
"""In which bounded plans may add gradients up."""
WORDS = {GATHER: "all-gather", "reduce_scatter": "reduce-scatter", REDUCE: "all-reduce"}
_BLOCK = re.compile(r"(.*?\.\d+)\.", re.ASCII)
_NUMBERED = re.compile(r"\.\d+$", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is planned: a model's step on a cluster."""

    problem: Problem
    units: Units
    executor: Executor
    narrow: bool = False
    """Whether gradients are added up in `NARROW`."""
    host_us: float = 0.0
    """See `Costs`."""

    @property
    def ranks(self) -> int:
        return self.problem.ranks

    @property
    def shape(self) -> Shape:
        shape = Shape.of(self.units, self.ranks)
        return replace(shape, reduce_bytes=DTYPE_BYTES[NARROW]) if self.narrow else shape

    def costs(self, shard_ranks: int | None) -> Costs:
        """Return what messages cost. Raises InputError where a cost is not known."""
        cluster = self.problem.cost.cluster
        messages = message_costs(cluster, shard_ranks)
        if shard_ranks is None:
            messages = replace(
                messages, gather_us=_measured(cluster, LIBRARY_GATHER, messages.gather_us),
                scatter_us=_measured(cluster, LIBRARY_SCATTER, messages.scatter_us),
            )  # fmt: skip
        parts = shard_ranks or self.ranks
        compute, network = self.problem.contention.compute, self.problem.contention.network
        if cluster.contention is None and self.executor == "accelerator" and cluster.library is not None:
            compute = SLOWDOWN
        return replace(
            messages, compute_factor=compute, network_factor=network,
            update_us=(self.units.update_us or self.problem.update_us) / parts, host_us=self.host_us,
        )  # fmt: skip


def _measured(cluster: Cluster, key: str, otherwise: Cost) -> Cost:
    curve: CostCurve | None = measured_curve(cluster, key)
    return otherwise if curve is None else curve.at


def make_setting(
    profile: Profile | str | Path, cluster: Cluster | str | Path | None = None, ranks: int | None = None
) -> Setting:
    """Join a profile with a cluster. Raises InputError as `make_problem` does, and on a single rank."""
    where = name_of(profile if cluster is None else cluster)
    problem = make_problem(find_profile(profile), None if cluster is None else find_cluster(cluster), ranks, where)
    if problem.ranks == 1:
        raise InputError(f"{where}: found one rank, expected at least two: a single one has nothing to gather")
    return setting_of(problem)


def setting_of(problem: Problem) -> Setting:
    """Return what is planned, of units that were measured or that gradients' names tell."""
    units = problem.profile.units or units_of_gradients(problem)
    on_host = problem.profile.world.device == "cpu" and problem.cost.cluster.library is None
    return Setting(problem=problem, units=units, executor="hosts" if on_host else "accelerator")


def units_of_gradients(problem: Problem) -> Units:
    """Return units of a profile without them: blocks by gradients' names, forward shared out as backward is.

    Activations, where their sum is known, are shared out by forward's time.
    """
    compute = problem.profile.compute
    share = problem.forward_us / (compute.backward_us or 1.0)
    kept = compute.estimate.activation_bytes if compute.estimate is not None else 0
    numel: dict[str, int] = {}
    back_us: dict[str, float] = {}
    for module, run in groupby(reversed(compute.gradients), key=lambda gradient: _module_of(gradient.name)):
        for gradient in run:
            numel[module] = numel.get(module, 0) + gradient.numel
            back_us[module] = back_us.get(module, 0.0) + gradient.backward_us
    total_us = sum(back_us.values()) or 1.0
    state = compute.optimizer.state_bytes if compute.optimizer is not None else None
    size_bytes = compute.size_bytes or 1
    return Units(
        units=tuple(
            Unit(
                module=module, forward_us=share * time_us, backward_us=time_us,
                activation_bytes=int(kept * time_us / total_us), input_requires_grad=index > 0,
            )
            for index, (module, time_us) in enumerate(back_us.items())
        ),
        weights=tuple(UnitWeight(modules=(module,), shape=(count,)) for module, count in numel.items()),
        element_bytes=DTYPE_BYTES[compute.gradients[0].dtype],
        state_factor=(state or 0) / size_bytes,
        update_us=problem.update_us,
        estimated=True,
    )  # fmt: skip


def _module_of(name: str) -> str:
    """The path of the block that a parameter is in, or of its module."""
    match = _BLOCK.match(name)
    return match[1] if match else name.rpartition(".")[0] or name


def baselines_of(setting: Setting) -> dict[str, FullyShardPlan]:
    """Return what users have instead, by name.

    On hosts, which do not run ahead, each group's gather is begun before the forward of the one before, where FSDP2 has
    it on accelerators.
    """
    units = Wrappings(setting.shape, setting.costs(None), setting.executor).units
    blocks = [unit for unit in units if _NUMBERED.search(unit)] or list(units)
    first, last = units.index(blocks[0]), units.index(blocks[-1])
    before, behind = units[:first], units[last + 1 :]
    titan: list[tuple[str, ...]] = [*((unit,) for unit in before), *((unit,) for unit in units[first : last + 1])]
    titan += [tuple(behind)] if behind else []
    kept: dict[str, bool | int] = {blocks[-1]: False, **({behind[0]: False} if behind else {})}
    plans = {
        PER_BLOCK: FullyShardPlan(groups=tuple((unit,) for unit in blocks)),
        ONE_UNIT: FullyShardPlan(groups=()),
        TITAN: FullyShardPlan(groups=tuple(titan), reshard_after_forward=kept),
    }
    if setting.executor == "hosts":
        plans = {name: with_ahead(plan, Ahead(forward=1)) for name, plan in plans.items()}
    return plans


def optimize_fsdp2(
    profile: Profile | str | Path,
    cluster: Cluster | str | Path | None = None,
    *,
    accuracy: Accuracy = "exact",
    max_memory_mib: float | None = None,
    ranks: int | None = None,
) -> Plan:
    """Decide groups, prefetches and kept parameters of a model under FSDP2, and its mesh.

    Args:
        profile: with `units` as `planner profile --parallel fsdp2` measures them; without, blocks are made of its
            gradients' names.
        cluster: as for `optimize`.
        accuracy: the riskiest class; from bounded on gradients may be added up in bfloat16 on accelerators.
        max_memory_mib: what each rank has for everything; default: the accelerator's, as profiled, if known.
        ranks: default: the cluster's.

    Raises InputError: a document is wrong; no wrapping takes as little memory as the limit (says the least that one
        does).
    """
    if accuracy not in ACCURACIES:
        raise InputError(f"accuracy: found {accuracy!r}, expected one of: {', '.join(ACCURACIES)}")
    setting = make_setting(profile, cluster, ranks)
    # On hosts reduce-scatters whose result is cast are waited for at once.
    may_round = accuracy != "exact" and setting.executor == "accelerator"
    if not may_round or setting.units.element_bytes <= DTYPE_BYTES[NARROW]:
        return plan_for(setting, max_memory_mib)
    narrow = plan_for(replace(setting, narrow=True), max_memory_mib)
    assert narrow.fsdp2 is not None
    assert narrow.predicted is not None
    narrow_us = narrow.predicted.iteration_us
    narrow = replace(narrow, accuracy="bounded", fsdp2=replace(narrow.fsdp2, reduce_dtype=NARROW))
    rounds = f"gradients are added up in {NARROW}, which rounds them"
    try:
        plan = plan_for(setting, max_memory_mib)
    except InputError as error:
        return replace(narrow, notes=(*narrow.notes, f"{rounds}; without, {error}"))
    assert plan.predicted is not None
    if narrow_us > (1.0 - GAIN) * plan.predicted.iteration_us:
        return replace(plan, notes=(*plan.notes, f"to add gradients up in {NARROW} would gain less than {GAIN:.0%}"))
    exact_ms = plan.predicted.iteration_us / 1e3
    notes = (*narrow.notes, f"{rounds}; without, {exact_ms:.2f} ms")
    return replace(narrow, baselines=plan.baselines, notes=notes)


def plan_for(setting: Setting, max_memory_mib: float | None = None) -> Plan:
    """Decide as `optimize_fsdp2`, on what is known already, in one dtype."""
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
    baselines = {
        name: simulate(setting.shape, plan, setting.costs(None), setting.executor)
        for name, plan in baselines_of(setting).items()
    }
    for name, plan in baselines_of(setting).items():  # the root's part in them is of no wrapping that was searched
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
    """Of all wrappings that were looked at, those that nothing smaller is as fast as; thinned out evenly."""
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


def wrapping_rows(plan: FullyShardPlan) -> list[tuple[str, str, str, str]]:
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
