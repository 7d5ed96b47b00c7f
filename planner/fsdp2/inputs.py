"""Inputs of the prediction of FSDP2's step: a profile's units on a cluster; and the wrappings that users have."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Literal

from planner.cost.curve import CostCurve
from planner.cost.halves import LIBRARY_GATHER, LIBRARY_SCATTER
from planner.cost.phases import measured_curve
from planner.documents.catalog import find_cluster, find_profile, name_of
from planner.documents.profile import DTYPE_BYTES, Cluster, Profile
from planner.documents.units import Unit, Units, UnitWeight
from planner.fsdp2.costs import SLOWDOWN, message_costs
from planner.fsdp2.program import Shape
from planner.fsdp2.search import Ahead, Wrappings, with_ahead
from planner.fsdp2.simulator import Cost, Costs, Executor
from planner.model.problem import Problem, make_problem
from runtime.errors import InputError
from runtime.plan import FullyShardPlan

PER_BLOCK, ONE_UNIT, TITAN = "per_block", "one_unit", "torchtitan"
NARROW: Literal["bfloat16"] = "bfloat16"
"""Dtype in which bounded plans may add gradients up."""
_BLOCK = re.compile(r"(.*?\.\d+)\.", re.ASCII)
_NUMBERED = re.compile(r"\.\d+$", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model's step on a cluster."""

    problem: Problem
    units: Units
    executor: Executor
    narrow: bool = False
    """Whether gradients are added up in `NARROW`."""
    host_us: float = 0.0
    """Time of a host before each message in microseconds, as in `Costs`."""

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
    """Return the path of the block that a parameter is in, or of its module."""
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
