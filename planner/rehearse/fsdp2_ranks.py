"""What every rank of a rehearsal under FSDP2 does, from the machine as it is to the compared steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist

from planner.comparison.fsdp2 import WARM_UP, Taken, Variant, take_turns, variants_of, weight_differences
from planner.fsdp2.decide import Setting, plan_for
from planner.fsdp2.program import Shape, host_program
from planner.fsdp2.search import Ahead, groupable_units, with_ahead
from planner.fsdp2.simulator import simulate
from planner.profile.links import LIBRARY_GATHER, LIBRARY_SCATTER, SMALLEST_BYTES, measure_links, timed_us
from planner.profile.progress import Progress
from planner.profile.step import joined
from planner.profile.units import LiveBytes
from planner.rehearse.fsdp2 import AskedUnits, RehearsedUnits
from planner.rehearse.ranks import (
    BLOCK_STEPS,
    LEAST_BYTES,
    LEAST_ROUNDS,
    LINK_SHARE,
    MOST_ROUNDS,
    OWN_STEPS,
    TIMEOUT_S,
    Teller,
    begin,
    unscaled,
)
from planner.rehearse.scale import Scale
from planner.rehearse.units import UnitsModel
from runtime.comm.world import World
from runtime.errors import InputError
from runtime.fully_sharded.hosts import overlap_on_hosts
from runtime.fully_sharded.wrap import fully_shard
from runtime.plan import FullyShardPlan, ModelReference, Plan, PlanWorld

CPU = torch.device("cpu")
ROUNDS_SHARE = 0.6
"""Of the time left, what the fewest rounds may take where the dilation is chosen."""
COPIES = 4.0
"""Before a reduce-scatter begins, hosts copy gradients twice, and whole parameters behind each gather."""
HALVINGS = 30
FIRST_STEPS = 2
"""Of each variant, before any counts: FSDP2 sets itself up in the first. In the last memory is counted."""
Decided = tuple[Plan, list[Variant], dict[str, float]]
"""The plan, what is compared, and what constants alone predict."""


def rehearse_rank_units(asked: AskedUnits, started_s: float, show_progress: bool) -> RehearsedUnits:
    """Rehearse on this rank; every rank calls it. `started_s`: wall-clock seconds when the command began."""
    with joined(None, TIMEOUT_S) as world:
        progress = Progress(show_progress and world.rank == 0)
        say = Teller(world.rank == 0)
        scale = begin(world, asked, say, lambda: _most_dilate(asked, asked.left_s(started_s)), COPIES)
        own_us = _own_us(asked, world, scale)
        plan, variants, from_constants_us = _decide(asked, world, scale, progress, own_us)
        rounds = world.gather(_rounds(asked, variants, scale, asked.left_s(started_s)), "agreeing on rounds")[0]
        if isinstance(rounds, InputError):
            raise rounds
        say(f"{len(variants)} wrappings: {rounds} rounds of {BLOCK_STEPS} steps each")
        models = {one.name: _wrapped(asked, plan, one, world, scale) for one in variants}
        counted_bytes = {name: _peak_bytes(asked, model, world, scale) for name, model in models.items()}
        before_us = {name: model.device.late_us for name, model in models.items()}

        def prepare(name: str) -> Callable[[], None]:
            return models[name].step

        end_s = started_s + 60.0 * asked.minutes
        step_us = take_turns(world, list(models), prepare, CPU, rounds, BLOCK_STEPS, end_s)
        steps = len(next(iter(step_us.values()))) * (WARM_UP + BLOCK_STEPS)
        late_us = {
            name: (model.device.late_us - before_us[name]) / steps / scale.dilate for name, model in models.items()
        }
        return RehearsedUnits(
            scale=scale, variants=tuple(variants),
            taken=Taken(step_us=_undilated(step_us, scale), differences=weight_differences(models)),
            from_constants_us=from_constants_us, counted_bytes=counted_bytes, late_us=late_us,
            limit_bytes=plan.fsdp2.memory_bytes if plan.fsdp2 is not None else None,
        )  # fmt: skip


def _undilated(step_us: Mapping[str, list[list[float]]], scale: Scale) -> dict[str, list[list[float]]]:
    return {
        name: [[one / scale.dilate for one in block] for block in blocks] for name, blocks in step_us.items()
    }  # fmt: skip


def _own_us(asked: AskedUnits, world: World, scale: Scale) -> float:
    """Return by how much a step of the plain model takes longer than its units and its update, undilated, on the last
    rank, for whom the others wait. What is compared is not looked at.
    """
    units = scale.units(asked.units)
    model = UnitsModel(units, world.rank, world.ranks, scale.dilate)
    asked_us = sum(unit.forward_us + unit.backward_us for unit in units.units) + units.update_us / world.ranks
    mine = []
    for _ in range(1 + OWN_STEPS):
        dist.barrier(group=world.group)
        mine.append(timed_us(model.step, CPU) - asked_us)
    everyone: list[list[float]] = world.gather(mine[1:], "steps without communication")
    last_us = statistics.median(max(of_ranks) for of_ranks in zip(*everyone, strict=True))
    return float(max(0.0, last_us, statistics.median(chain(*everyone))) / scale.dilate)


def _decide(asked: AskedUnits, world: World, scale: Scale, progress: Progress, own_us: float) -> Decided:
    """Time messages alone, and decide by that; the first rank does, for all."""
    size_bytes = round(sum(weight.numel for weight in asked.units.weights) * asked.units.element_bytes / scale.shrink)
    names = (LIBRARY_GATHER, LIBRARY_SCATTER)
    each_s = LINK_SHARE * asked.minutes * 60.0 / len(names)
    smallest_bytes = max(LEAST_BYTES * world.ranks, round(SMALLEST_BYTES / scale.shrink))
    times = measure_links(world, CPU, size_bytes, progress, names, each_s, smallest_bytes)
    setting = asked.setting(asked.flat(samples=unscaled(times.samples, scale)))
    host_us = _host_us(asked, world, scale, setting)
    mine: Decided | InputError | None = None
    if world.rank == 0:
        try:
            # Each rank updates a part, and each has what is its own.
            units = replace(asked.units, update_us=asked.units.update_us + own_us * world.ranks)
            mine = _variants(asked, replace(setting, units=units, host_us=host_us))
        except InputError as error:
            mine = error
    found = world.gather(mine, "deciding")[0]
    if isinstance(found, InputError):
        raise found
    return found  # type: ignore[no-any-return]


def _host_us(asked: AskedUnits, world: World, scale: Scale, setting: Setting) -> float:
    """Return what a host does itself before each message, undilated, as this machine's cores are shared.

    It is what the step of a model lasts longer than its messages that computes nothing, weighs next to nothing, and has
    a group for each of the units. What is compared is not looked at.
    """
    light = replace(
        asked.units, update_us=0.0, loss_working_bytes=0,
        units=tuple(
            replace(unit, forward_us=0.0, backward_us=0.0, activation_bytes=0, forward_working_bytes=0,
                    backward_working_bytes=0)
            for unit in asked.units.units
        ),
        weights=tuple(replace(weight, shape=(world.ranks,)) for weight in asked.units.weights),
    )  # fmt: skip
    alone = with_ahead(
        FullyShardPlan(groups=tuple((unit,) for unit in groupable_units(Shape.of(light, world.ranks)))), Ahead(1)
    )
    plain, wrapped = (UnitsModel(light, world.rank, world.ranks, scale.dilate) for _ in range(2))
    plan = Plan(
        model=ModelReference(name=asked.name), world=PlanWorld(ranks=world.ranks), accuracy="exact", buckets=(),
        fsdp2=alone,
    )  # fmt: skip
    fully_shard(wrapped, plan, timeout_s=TIMEOUT_S)
    overlap_on_hosts(wrapped, alone, TIMEOUT_S).arrived = wrapped.device.arrived
    longer_us = (_lasting_us(wrapped, world) - _lasting_us(plain, world)) / scale.dilate
    weightless = replace(setting, units=light)

    def predicted_us(host_us: float) -> float:
        costs = replace(weightless.costs(None), update_us=0.0, host_us=host_us)
        return simulate(weightless.shape, alone, costs, setting.executor, bars=False).iteration_us

    messages = sum(1 for _ in host_program(weightless.shape, alone, waits=True).messages())
    low, high = 0.0, max(0.0, longer_us)
    for _ in range(HALVINGS if messages else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted_us(middle) < longer_us else (low, middle)
    return low


def _lasting_us(model: UnitsModel, world: World) -> float:
    """Return how long a step lasts on the last rank."""
    mine = []
    for _ in range(FIRST_STEPS + OWN_STEPS):
        dist.barrier(group=world.group)
        mine.append(timed_us(model.step, CPU))
    everyone: list[list[float]] = world.gather(mine[FIRST_STEPS:], "steps that compute nothing")
    return float(statistics.median(max(of_ranks) for of_ranks in zip(*everyone, strict=True)))


def _variants(asked: AskedUnits, setting: Setting) -> Decided:
    plan = plan_for(setting, asked.max_memory_mib)
    assert plan.fsdp2 is not None
    variants = variants_of(setting, plan.fsdp2)
    by_constants = _predicted(asked.setting(asked.cluster), variants)
    plan = replace(plan, model=ModelReference(name=plan.model.name), predicted=None, baselines=None)
    return plan, variants, by_constants


def _predicted(setting: Setting, variants: Sequence[Variant]) -> dict[str, float]:
    """Return the steps of wrappings by what the setting's cluster says."""
    return {
        one.name: simulate(setting.shape, one.spec, setting.costs(None), setting.executor, bars=False).iteration_us
        for one in variants
    }


def _wrapped(asked: AskedUnits, plan: Plan, variant: Variant, world: World, scale: Scale) -> UnitsModel:
    """Return the scaled model, wrapped by stock FSDP2 as the variant says, after its first step."""
    model = UnitsModel(scale.units(asked.units), world.rank, world.ranks, scale.dilate)
    fully_shard(model, replace(plan, fsdp2=variant.spec), timeout_s=TIMEOUT_S)
    overlap_on_hosts(model, variant.spec, TIMEOUT_S).arrived = model.device.arrived
    for _ in range(FIRST_STEPS - 1):
        model.step()
    return model


def _peak_bytes(asked: AskedUnits, model: UnitsModel, world: World, scale: Scale) -> int:
    """Count the peak of one step, unshrunk: all that is allocated, this rank's parts, and what the optimizer holds."""
    with LiveBytes(model.local_pointers()) as live:
        model.step()
    held_bytes = model.local_bytes()
    return round(scale.shrink * (live.total_bytes + held_bytes) + scale.shrink * asked.units.state_factor * held_bytes)


def _most_dilate(asked: AskedUnits, left_s: float) -> float:
    """Return the dilation at which the fewest rounds take most of what is left, by the cluster's constants."""
    setting = asked.setting(asked.cluster)
    chosen = plan_for(setting, asked.max_memory_mib).fsdp2
    assert chosen is not None
    step_us = sum(_predicted(setting, variants_of(setting, chosen)).values())
    computed_us = sum(unit.forward_us + unit.backward_us for unit in asked.units.units)
    fewest_us = step_us * (FIRST_STEPS + LEAST_ROUNDS * (WARM_UP + BLOCK_STEPS)) + (1 + OWN_STEPS) * computed_us
    return float(max(1.0, ROUNDS_SHARE * left_s * 1e6 / fewest_us))


def _rounds(asked: AskedUnits, variants: Sequence[Variant], scale: Scale, left_s: float) -> int | InputError:
    """Return how many rounds fit, or an error that says how many minutes would do."""
    step_s = scale.dilate * sum(one.predicted_us or 0.0 for one in variants) / 1e6
    left_s -= FIRST_STEPS * step_s
    round_s = (WARM_UP + BLOCK_STEPS) * step_s
    lacking_s = LEAST_ROUNDS * round_s - left_s
    if lacking_s > 0.0:
        return InputError(
            f"--minutes {asked.minutes:g}: a round of {len(variants)} wrappings takes {round_s:.2g} s here, and "
            f"{max(0.0, left_s):.0f} s are left for {LEAST_ROUNDS} of them; expected --minutes "
            f"{asked.minutes + lacking_s / 60.0 + 0.5:.0f} or more, or --dilate less"
        )
    return min(MOST_ROUNDS, int(left_s / round_s))
