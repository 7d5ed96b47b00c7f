"""Basis of a profile's compute times, and the same times on another accelerator. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

from planner.documents.accelerators import (
    ACCELERATORS,
    SCALED_WITHIN,
    find_accelerator,
    kind_of,
    memory_ratio,
    speed_ratio,
)
from planner.documents.profile import Cluster, ComputeProfile, Profile
from planner.documents.units import Units
from runtime.errors import InputError
from runtime.plan.strict_json import Record

T = TypeVar("T")
Basis = Literal["measured", "scaled", "estimated", "as profiled"]

PUBLISHED_WITHIN, ASSUMED_WITHIN = 0.15, 1.0
"""Relative errors of estimated times: if the share of the peak was published for the accelerator (other
micro-batches alone move that of MPT by 6 %), and where it is assumed (published ones lie between 0.42 and 0.69)."""


@dataclass(frozen=True, kw_only=True)
class ComputeBasis:
    """Accelerator on which a profile computes on a cluster, and how its times are known."""

    basis: Basis
    """`as profiled`: one of the two does not name its accelerator, so that the times are taken as they are."""
    accelerator: str | None
    """Accelerator of the cluster; if it names none, the one that was measured on. None: neither is known."""
    measured_on: str | None
    """Accelerator in the profile: the name of a device, or of its kind."""
    speed: float = 1.0
    """Speed of forward and backward relative to the profile."""
    within: float | None = None
    """Relative error of the times; None for measured ones."""

    def __str__(self) -> str:
        """Return the basis in words.

        >>> print(ComputeBasis(basis="scaled", accelerator="h100", measured_on="V100", speed=5.43, within=0.35))
        compute scaled from V100: 5.43 times as fast, ± 35%
        """
        if self.basis == "scaled":
            how = f"scaled from {self.measured_on}: {self.speed:.3g} times as fast"
        elif self.basis == "estimated":
            how = "estimated: FLOPs over a share of the peak"
        else:
            how = self.basis
        if self.within is None:
            return f"compute {how}"
        off = f"± {self.within:.0%}" if self.within < 1.0 else f"within a factor of {1.0 + self.within:g}"
        return f"compute {how}, {off}"


def compute_basis(profile: Profile, cluster: Cluster) -> ComputeBasis:
    """Return what the compute times of `on_accelerator(profile, cluster)` rest on."""
    estimate, new = profile.compute.estimate, cluster.computes_on
    if estimate is not None:
        name = new or estimate.gpu
        basis: Basis = "estimated" if new else "as profiled"
        published = name in estimate.efficiency or kind_of(name) in estimate.efficiency
        speed, within = 1.0 / _step_ratio(profile, name), PUBLISHED_WITHIN if published else ASSUMED_WITHIN
        return ComputeBasis(basis=basis, accelerator=name, measured_on=None, speed=speed, within=within)
    old, measured_on = _measured_on(profile), profile.world.accelerator or profile.world.device
    if new is None or old is None:
        return ComputeBasis(basis="as profiled", accelerator=new or old or measured_on, measured_on=measured_on)
    if old == new:
        return ComputeBasis(basis="measured", accelerator=new, measured_on=measured_on)
    speed = speed_ratio(old, new)
    return ComputeBasis(basis="scaled", accelerator=new, measured_on=measured_on, speed=speed, within=SCALED_WITHIN)


def check_accelerators(profile: Profile, cluster: Cluster) -> None:
    """Raise InputError where it cannot be known how long the model computes on the cluster's accelerators."""
    name, where = profile.model.name, cluster.name or "the cluster"
    new, measured_on = cluster.computes_on, profile.world.accelerator or profile.world.device
    if profile.compute.estimate is not None:
        if new is None:
            raise InputError(
                f"{name}: its times are FLOPs over a share of an accelerator's peak, and {where} does not name its "
                f'accelerator; expected one: `--accelerator h100`, or "accelerator" in cluster.json'
            )
        return
    if new is not None and _measured_on(profile) is None:
        raise InputError(
            f"{name}: measured on {measured_on or 'an accelerator that is not named'}, whose rates are not known, and "
            f"{where} has {new}; expected one of {', '.join(ACCELERATORS)} in the profile ($.world.accelerator), or a "
            f"profile measured on {new}"
        )


def on_accelerator(profile: Profile, cluster: Cluster) -> Profile:
    """Return the profile with its times and memory on the cluster's accelerators, where both are known. Memory that
    the cluster states is that of the rank with the least.
    """
    moved, stated_mib = _moved(profile, cluster), cluster.memory_mib
    if stated_mib is None:
        return moved
    # Its name alone identifies the accelerator then: variants are otherwise distinguished by their memory.
    name = _measured_on(moved) or moved.world.accelerator
    return replace(moved, world=replace(moved.world, accelerator=name, memory_bytes=int(min(stated_mib) * 2**20)))


def _moved(profile: Profile, cluster: Cluster) -> Profile:
    estimate, new = profile.compute.estimate, cluster.computes_on
    old = _measured_on(profile) if estimate is None else estimate.gpu
    if old is None or new is None or old == new:
        return profile
    ratio = _step_ratio(profile, new)
    moved = scale_profile(profile, ratio, 1.0 / memory_ratio(old, new), ratio)  # operators are products of matrices
    world = replace(profile.world, accelerator=new, memory_bytes=int(ACCELERATORS[new].memory_bytes))
    compute = moved.compute if estimate is None else replace(moved.compute, estimate=replace(estimate, gpu=new))
    if compute.by_rank is not None:  # of which each has the memory of what it was measured on
        compute = replace(compute, by_rank=tuple(replace(rank, memory_bytes=None) for rank in compute.by_rank))
    return replace(moved, compute=compute, world=world)


def _measured_on(profile: Profile) -> str | None:
    return find_accelerator(profile.world.accelerator, profile.world.memory_bytes)


def _step_ratio(profile: Profile, new: str) -> float:
    """Return how many times as long forward and backward take on an accelerator as profiled."""
    estimate = profile.compute.estimate
    if estimate is None:
        old = _measured_on(profile)
        return 1.0 if old is None else 1.0 / speed_ratio(old, new)
    before, after = ACCELERATORS[estimate.gpu].dense_flops, ACCELERATORS[new].dense_flops
    return before * estimate.share_of(estimate.gpu) / (after * estimate.share_of(new))


STEP_TIMES = (
    "forward_us",
    "backward_us",
    "grad_input_us",
    "grad_weight_us",
    "batch_us",
    "loss_us",
    "fixed_us",
    "sample_us",
)
UPDATE_TIMES = ("update_us", "norm_us", "before_us")
"""Fields of records that grow with forward and backward, and with the optimizer's update."""


def scale_profile(profile: Profile, step: float, update: float, operator: float | None = None) -> Profile:
    """Return the profile with forward and backward times `step`, updates times `update`; `operator`: see
    `scale_compute`.

    Minibatches of local updaters are multiplied by what they spend on either.
    """
    if step == 1.0 and update == 1.0:
        return profile
    compute, measured = scale_compute(profile.compute, step, update, operator), profile.local_async
    both = step
    if measured is not None:
        updating = min(1.0, sum(layer.update_us for layer in measured.layers) / measured.curve[0].minibatch_us)
        both = step * (1.0 - updating) + update * updating
    factors = _factors(step, update) | {"minibatch_us": both, "averaging_us": both}
    scaled = {name: scale_times(getattr(profile, name), factors) for name in ("layers", "units", "local_async")}
    return replace(profile, compute=compute, **scaled)


def scale_compute(compute: ComputeProfile, step: float, update: float, operator: float | None = None) -> ComputeProfile:
    """Return forward and backward times `step`, the update times `update`, but for operators of matrices, which are a
    part of it: times `operator`, by default as the rest.
    """
    operator = update if operator is None else operator
    if step == update == operator == 1.0:
        return compute
    shapes = compute.operator.shapes if compute.operator else ()
    more_us = (operator - update) * sum(shape.operator_us * len(shape.parameters) for shape in shapes)
    scaled = scale_times(compute, _factors(step, update) | {"operator_us": operator, "stacked_us": operator})
    return replace(scaled, update_us=max(0.0, scaled.update_us + more_us), intervals=None)


def _factors(step: float, update: float) -> dict[str, float]:
    return dict.fromkeys(STEP_TIMES, step) | dict.fromkeys(UPDATE_TIMES, update)


def scale_units(units: Units, step: float, update: float) -> Units:
    """Return forward and backward of units times `step`, their update times `update`."""
    return scale_times(units, _factors(step, update))


def scale_times(value: T, factors: Mapping[str, float]) -> T:
    """Return a record, or a tuple of records, whose fields are multiplied by the factors of their names; fields of
    records inside of it, too.
    """
    if isinstance(value, tuple):
        return cast(T, tuple(scale_times(each, factors) for each in value))
    if not isinstance(value, Record):
        return value
    changed: dict[str, Any] = {}
    for name, field in vars(value).items():
        if isinstance(field, Record | tuple):
            changed[name] = scale_times(field, factors)
        elif field is not None and name in factors:
            changed[name] = field * factors[name]
    return cast(T, replace(cast(Any, value), **changed))
