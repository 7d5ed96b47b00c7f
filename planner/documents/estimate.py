"""What a profile's compute times rest on, and the same times on another accelerator. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from planner.documents.accelerators import (
    ACCELERATORS,
    SCALED_WITHIN,
    find_accelerator,
    kind_of,
    memory_ratio,
    speed_ratio,
)
from planner.documents.local_async import LocalAsyncProfile
from planner.documents.profile import Cluster, ComputeProfile, Profile
from planner.documents.units import Units
from runtime.errors import InputError

Basis = Literal["measured", "scaled", "estimated", "as profiled"]

PUBLISHED_WITHIN, ASSUMED_WITHIN = 0.15, 1.0
"""By what share estimated times may be off: where the share of the peak was published for the accelerator (other
micro-batches alone move that of MPT by 6 %), and where it is assumed (published ones lie between 0.42 and 0.69)."""


@dataclass(frozen=True, kw_only=True)
class ComputeBasis:
    """On which accelerator a profile computes on a cluster, and how its times are known."""

    basis: Basis
    """`as profiled`: one of the two does not name its accelerator, so that the times are taken as they are."""
    accelerator: str | None
    """Of the cluster; where that names none, the profile's as it was measured. None: neither is known."""
    measured_on: str | None
    """What the profile says: the name of a device, or of its kind."""
    speed: float = 1.0
    """How many times as fast forward and backward are as profiled."""
    within: float | None = None
    """By what share the times may be off; None for measured ones."""

    def __str__(self) -> str:
        """In words.

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
    world = profile.world
    if estimate is not None:
        name = new or estimate.gpu
        published = name in estimate.efficiency or kind_of(name) in estimate.efficiency
        within = PUBLISHED_WITHIN if published else ASSUMED_WITHIN
        speed = 1.0 / _step_ratio(profile, name)
        return ComputeBasis(
            basis="estimated" if new else "as profiled", accelerator=name, measured_on=None, speed=speed, within=within
        )
    old, measured_on = find_accelerator(world.accelerator), world.accelerator or world.device
    if new is None or old is None:
        return ComputeBasis(basis="as profiled", accelerator=new or old or measured_on, measured_on=measured_on)
    if old == new:
        return ComputeBasis(basis="measured", accelerator=new, measured_on=measured_on)
    return ComputeBasis(
        basis="scaled", accelerator=new, measured_on=measured_on, speed=speed_ratio(old, new), within=SCALED_WITHIN
    )


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
    if new is not None and find_accelerator(profile.world.accelerator) is None:
        raise InputError(
            f"{name}: measured on {measured_on or 'an accelerator that is not named'}, whose rates are not known, and "
            f"{where} has {new}; expected one of {', '.join(ACCELERATORS)} in the profile ($.world.accelerator), or a "
            f"profile measured on {new}"
        )


def on_accelerator(profile: Profile, cluster: Cluster) -> Profile:
    """Return the profile with its times, and its memory, on the cluster's accelerators where both are known."""
    estimate, new = profile.compute.estimate, cluster.computes_on
    old = find_accelerator(profile.world.accelerator) if estimate is None else estimate.gpu
    if old is None or new is None or old == new:
        return profile
    moved = scale_profile(profile, _step_ratio(profile, new), 1.0 / memory_ratio(old, new))
    world = replace(profile.world, accelerator=new, memory_bytes=int(ACCELERATORS[new].memory_bytes))
    compute = moved.compute if estimate is None else replace(moved.compute, estimate=replace(estimate, gpu=new))
    return replace(moved, compute=compute, world=world)


def _step_ratio(profile: Profile, new: str) -> float:
    """Return how many times as long forward and backward take on an accelerator as profiled."""
    estimate = profile.compute.estimate
    if estimate is None:
        old = find_accelerator(profile.world.accelerator)
        return 1.0 if old is None else 1.0 / speed_ratio(old, new)
    before, after = ACCELERATORS[estimate.gpu].dense_flops, ACCELERATORS[new].dense_flops
    return before * estimate.share_of(estimate.gpu) / (after * estimate.share_of(new))


def scale_profile(profile: Profile, step: float, update: float) -> Profile:
    """Return the profile with forward and backward times `step`, updates times `update`."""
    if step == 1.0 and update == 1.0:
        return profile
    layers = profile.layers and tuple(
        replace(
            layer, forward_us=_times(layer.forward_us, step), grad_input_us=_times(layer.grad_input_us, step),
            grad_weight_us=_times(layer.grad_weight_us, step),
        )
        for layer in profile.layers
    )  # fmt: skip
    return replace(
        profile,
        compute=scale_compute(profile.compute, step, update),
        layers=layers,
        units=profile.units and scale_units(profile.units, step, update),
        local_async=profile.local_async and _scale_updaters(profile.local_async, step, update),
    )


def _times(time_us: float | None, factor: float) -> float | None:
    return None if time_us is None else time_us * factor


def scale_compute(compute: ComputeProfile, step: float, update: float) -> ComputeProfile:
    """Return forward and backward times `step`, the update times `update`."""
    if step == 1.0 and update == 1.0:
        return compute
    norms = compute.norms
    if norms is not None:
        norms = replace(norms, layers=tuple(replace(layer, norm_us=layer.norm_us * update) for layer in norms.layers))
    return replace(
        compute,
        forward_us=compute.forward_us * step,
        update_us=compute.update_us * update,
        norms=norms,
        intervals=None,
        gradients=tuple(replace(g, backward_us=g.backward_us * step) for g in compute.gradients),
    )


def scale_units(units: Units, step: float, update: float) -> Units:
    """Return forward and backward of units times `step`, their update times `update`."""
    return replace(
        units,
        units=tuple(
            replace(unit, forward_us=unit.forward_us * step, backward_us=unit.backward_us * step)
            for unit in units.units
        ),
        update_us=units.update_us * update,
    )  # fmt: skip


def _scale_updaters(measured: LocalAsyncProfile, step: float, update: float) -> LocalAsyncProfile:
    """Backward times `step`, updates times `update`, and minibatches by what they spend on either."""
    updating = min(1.0, sum(layer.update_us for layer in measured.layers) / measured.curve[0].minibatch_us)
    both = step * (1.0 - updating) + update * updating
    layers = [
        replace(
            layer,
            grad_weight_us=layer.grad_weight_us * step,
            grad_input_us=layer.grad_input_us * step,
            update_us=layer.update_us * update,
        )
        for layer in measured.layers
    ]
    curve = [
        replace(
            point,
            minibatch_us=point.minibatch_us * both,
            averaging_us=None if point.averaging_us is None else point.averaging_us * both,
        )
        for point in measured.curve
    ]
    before = {name: getattr(measured, name) * step for name in ("batch_us", "forward_us", "loss_us")}
    return replace(measured, **before, layers=tuple(layers), curve=tuple(curve))
