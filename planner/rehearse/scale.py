"""The scale at which one machine can carry a cluster. Torch-free.

As in a wind tunnel: all times are dilated by D and all bytes shrunk by S, so that a link of rate R has R/(D·S). The
machine's own costs then weigh less: a start-up D times less, a byte moved by a socket or copied D·S times less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from planner.cost import nccl
from planner.cost.model import communication_cost
from planner.documents.estimate import scale_compute, scale_units
from planner.documents.profile import DTYPE_BYTES, Cluster, ComputeProfile, Gradient, Link, OperatorProfile, Profile
from planner.documents.units import Units
from runtime.errors import InputError
from runtime.plan import Plan
from runtime.plan.names import layer_of

SOCKET_SHARE = 0.1
"""Share of the time of a message that the machine may be busy moving it."""
UPDATE_SHARE = 0.005
"""Share of a step's compute that the real update may take if the profile has none, or a shorter one."""
MEMORY_COPIES = 14
"""Copies of the model on a rank: weights, gradients, the optimizer's state, results of operators, a block's copies, and
what has been freed and not given back; 12 to 14 were measured with Muon."""
MEMORY_SHARE = 0.8
"""Share of the machine's memory that all ranks may hold together."""
SMALL_BYTES = 1024.0
"""A message whose time is its start-up."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A scale: times are multiplied by `dilate`, bytes divided by `shrink`."""

    dilate: float
    shrink: float

    def rate(self, bits_per_s: float) -> float:
        """Return the scaled rate of a link."""
        return bits_per_s / (self.dilate * self.shrink)

    def numel(self, numel: int) -> int:
        """Return the scaled number of elements; at least one, if there is any."""
        return max(min(1, numel), round(numel / self.shrink))

    def profile(self, profile: Profile) -> Profile:
        """Return the profile as it is on the scaled cluster, without a cluster."""
        compute = scale_compute(profile.compute, self.dilate, self.dilate)
        gradients = tuple(replace(each, numel=self.numel(each.numel), spread_us=None) for each in compute.gradients)
        compute = replace(
            compute, gradients=gradients, step_spread_us=None, intervals=None, operator=self._operator(compute.operator)
        )
        return replace(profile, compute=compute, cluster=None)

    def _operator(self, operator: OperatorProfile | None) -> OperatorProfile | None:
        """Return an operator of shrunk parameters, which have one dimension."""
        if operator is None:
            return None
        shapes = []
        for shape in operator.shapes:
            whole = prod(shape.shape)
            numel = self.numel(whole)
            size_bytes = round(numel * shape.result_bytes / whole)
            shapes.append(replace(shape, shape=(numel,), result_bytes=size_bytes))
        return replace(operator, shapes=tuple(shapes))

    def units(self, units: Units) -> Units:
        """Return a model's units as they are on the scaled cluster."""

        sizes = ("activation_bytes", "forward_working_bytes", "backward_working_bytes", "carried_bytes")
        units = scale_units(units, self.dilate, self.dilate)
        return replace(
            units,
            units=tuple(
                replace(unit, **{name: round(getattr(unit, name) / self.shrink) for name in sizes})
                for unit in units.units
            ),
            weights=tuple(replace(weight, shape=(self.numel(weight.numel),)) for weight in units.weights),
            loss_working_bytes=round(units.loss_working_bytes / self.shrink),
        )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The performance of the emulated hosts as they are, with links that nothing limits."""

    ranks: int
    start_up_us: float
    """Time of an all-reduce of hardly any bytes."""
    us_per_byte: float
    """Time per byte of a large all-reduce."""
    update_us_per_byte: float
    """Time of an optimizer's step on all ranks at once, by the bytes of one rank's weights."""
    memory_bytes: float


@dataclass(frozen=True, kw_only=True)
class Links:
    """The performance of the links of the cluster."""

    start_up_us: float
    """Time of an all-reduce of hardly any bytes."""
    us_per_byte: float
    """Time per byte of a large all-reduce."""
    inter_bits_per_s: float
    intra_bits_per_s: float | None
    """Rate of intra-node links; None with one rank a host."""


def on_hosts(cluster: Cluster, hosts: int, ranks_per_host: int) -> Cluster:
    """Return the same links between `hosts` hosts; measurements stay if the numbers are those of the cluster.

    Raises:
        InputError: nothing is known of a link that these hosts have.
    """
    if (cluster.nodes, cluster.ranks_per_node) == (hosts, ranks_per_host):
        return cluster
    for field, given in (("speed", cluster.speed), ("memory_mib", cluster.memory_mib)):
        if given is not None and len(given) not in (hosts, hosts * ranks_per_host):
            raise InputError(
                f"--hosts {hosts}x{ranks_per_host}: the cluster has {field} of {len(given)} ranks or nodes, expected "
                f"one for each: leave --hosts out, or take {field} out of the cluster"
            )
    inter, intra = _link(cluster, "inter"), _link(cluster, "intra")
    # A measurement over all ranks is one of the link only if there is one kind of link.
    if inter is None and cluster.ranks_per_node == 1:
        inter = communication_cost(cluster).link
    if hosts > 1 and inter is None:
        measured = f"{cluster.nodes}x{cluster.ranks_per_node}" if cluster.samples or cluster.collectives else None
        raise InputError(
            f"--hosts {hosts}x{ranks_per_host}: the cluster {cluster.name or ''} has no link constants between nodes "
            f'("inter"), from which {hosts} hosts could be made; expected them'
            + ("" if measured is None else f", or the hosts that were measured, {measured}")
        )
    if ranks_per_host > 1 and intra is None:
        raise InputError(
            f"--hosts {hosts}x{ranks_per_host}: the cluster {cluster.name or ''} has no link constants inside nodes "
            f'("intra"); expected them, or one rank a host: --hosts {hosts * ranks_per_host}x1'
        )
    return replace(
        cluster, nodes=hosts, ranks_per_node=ranks_per_host, inter=inter, intra=intra, samples=None,
        back_to_back=None, collectives=None, contention=None,
    )  # fmt: skip


def _link(cluster: Cluster, name: Literal["inter", "intra"]) -> Link | None:
    """Return the constants of a link: as written, else those of the machines that are described for NCCL's model."""
    written: Link | None = getattr(cluster, name)
    return written or nccl.link_of(cluster, name)


def links_of(cluster: Cluster) -> Links:
    """Return the performance of a cluster's links. Raises InputError if no rate follows from what is known."""
    cost = communication_cost(cluster)
    inter = _link(cluster, "inter") or (cost.link if cluster.ranks_per_node == 1 else None)
    if inter is None or inter.beta_us_per_byte <= 0.0:
        raise InputError(
            f"cluster {cluster.name or '(unnamed)'}: no rate of the link between nodes is known, expected "
            f'"inter" with beta_us_per_byte or bandwidth; add it'
        )
    intra = _link(cluster, "intra") if cluster.ranks_per_node > 1 else None
    small_us = float(cost.all_reduce(SMALL_BYTES))
    large_bytes = 2.0**26
    return Links(
        start_up_us=small_us,
        us_per_byte=(float(cost.all_reduce(large_bytes)) - small_us) / large_bytes,
        inter_bits_per_s=8e6 / inter.beta_us_per_byte,
        intra_bits_per_s=8e6 / intra.beta_us_per_byte if intra and intra.beta_us_per_byte > 0.0 else None,
    )


def choose_scale(
    links: Links, machine: Machine, profile: Profile, *, most_dilate: float, dilate: float | None, shrink: float | None
) -> Scale:
    """Return the scale at which start-ups are the cluster's, sockets are not busy, and the model fits.

    Args:
        links: of the cluster.
        machine: of these ranks, as it was measured.
        profile: the model.
        most_dilate: the dilation that there is time for; if start-ups need more, they weigh more than on the cluster.
        dilate: given, or None.
        shrink: given, or None.

    Raises:
        InputError: the model does not fit at what was given.
    """
    dilate = dilate or max(1.0, round(min(most_dilate, machine.start_up_us / max(links.start_up_us, 1e-3)), 1))
    compute, model_bytes = profile.compute, sum(gradient.size_bytes for gradient in profile.compute.gradients)
    held_bytes = MEMORY_COPIES * machine.ranks * model_bytes
    least = held_bytes / (MEMORY_SHARE * machine.memory_bytes)
    if shrink is None:
        slower = machine.us_per_byte / SOCKET_SHARE / max(links.us_per_byte, 1e-9)
        compute_us = compute.forward_us + sum(gradient.backward_us for gradient in compute.gradients)
        longer = machine.update_us_per_byte * model_bytes / max(compute.update_us, UPDATE_SHARE * compute_us)
        shrink = max(1.0, round(slower / dilate, 1), round(longer / dilate, 1), round(least + 0.05, 1))
    elif shrink < least:
        raise InputError(
            f"--shrink {shrink:g}: {machine.ranks} ranks would hold {held_bytes / shrink / 2**30:.1f} GiB of this "
            f"model, and this machine has {machine.memory_bytes / 2**30:.1f} GiB; shrink by {least:.2g} or more, or "
            f"take fewer hosts"
        )
    return Scale(dilate=dilate, shrink=shrink)


def check_profile(profile: Profile, where: str) -> None:
    """Raise InputError if no step can be emulated by this profile."""
    gradients = profile.compute.gradients
    if sum(gradient.backward_us for gradient in gradients) <= 0.0:
        raise InputError(
            f"{where}: no gradient has a time (backward_us), expected when each is ready: measure it with "
            f"`planner profile`"
        )
    odd = next((each for each in gradients if not _can_be_held(each)), None)
    if odd is not None:
        raise InputError(
            f"{where}: the gradient {odd.name} is of {odd.dtype}, which gloo cannot add up; expected float16, "
            f"bfloat16, float32 or float64"
        )


def _can_be_held(gradient: Gradient) -> bool:
    return DTYPE_BYTES[gradient.dtype] >= 2 and not gradient.dtype.startswith("complex")


def scaled_plan(plan: Plan, scale: Scale, compute: ComputeProfile, fingerprint: str) -> Plan:
    """Return the plan as the scaled model can carry it out: the same buckets, of fewer bytes.

    Args:
        plan: of the unscaled model.
        scale: of the rehearsal.
        compute: the unscaled model.
        fingerprint: of the scaled model.
    """
    numel = {gradient.name: gradient.numel for gradient in compute.gradients}
    buckets = []
    for bucket in plan.buckets:
        spec = bucket.compressor
        if spec.k is not None:
            layers: dict[str, list[int]] = {}
            for name in bucket.gradients:
                layers.setdefault(layer_of(name), []).append(numel[name])
            # The share of the scaled layer stays: small gradients are rounded, and keep an element at least.
            spec = replace(
                spec,
                k={
                    layer: max(1, round(k / sum(layers[layer]) * sum(map(scale.numel, layers[layer]))))
                    for layer, k in spec.k.items()
                },
            )
        buckets.append(replace(bucket, compressor=spec, size_bytes=None))
    return replace(
        plan, model=replace(plan.model, fingerprint=fingerprint), buckets=tuple(buckets), fallback=None, loading=None
    )
