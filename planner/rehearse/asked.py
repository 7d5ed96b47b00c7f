"""The request of `planner rehearse`: a plan with buckets, or wrappings for FSDP2. Torch-free."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from planner.comparison.report import Comparison, summarize
from planner.comparison.wrappings import summarize_wrappings
from planner.decide.batch_shares import choose_shares
from planner.decide.plan_request import Request, check_accuracy
from planner.documents.catalog import find_cluster, find_profile
from planner.documents.estimate import on_accelerator
from planner.documents.profile import Cluster, Link, OptimizerProfile, Profile
from planner.documents.speeds import on_slowest
from planner.documents.text import mebibytes
from planner.documents.units import Units
from planner.fsdp2.inputs import Setting, units_of_gradients
from planner.model.problem import make_problem
from planner.rehearse.scale import check_profile, links_of, on_hosts
from planner.testbed.hosts import MAX_RANKS, Emulation, parse_emulation
from runtime.errors import InputError
from runtime.plan import Accuracy

if TYPE_CHECKING:
    from planner.comparison.measure import Measured

Figures = Mapping[str, Mapping[str, float]]
"""Figures of rows by their name in JSON and by variant."""
Bounds = Mapping[str, float | None]
"""Figures of a rehearsal as a whole, by their name in JSON."""

STRATEGIES = ("wfbp", "single", "mg_wfbp")
DEFAULT_MINUTES, LEAST_MINUTES, MOST_MINUTES = 10.0, 0.5, 600.0
MOST_SCALE = 1e6
LATE_SHARE = 0.01
"""Share of a step from which host time that does not fit under waits is reported."""
PLAIN_SGD = OptimizerProfile(name="SGD", adaptive=False, elementwise=True, holds_all=True)
_HOSTS = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model and the hosts that are emulated, for how long and at which scale."""

    name: str
    profile: Profile
    cluster: Cluster
    """The cluster with as many hosts and ranks as are emulated."""
    minutes: float = DEFAULT_MINUTES
    dilate: float | None = None
    """Factor of times; None: chosen."""
    shrink: float | None = None
    """Divisor of bytes; None: chosen."""

    def __post_init__(self) -> None:
        """Raise InputError if minutes or scale are out of bounds."""
        if not LEAST_MINUTES <= self.minutes <= MOST_MINUTES:
            raise InputError(
                f"--minutes: found {self.minutes:g}, expected {LEAST_MINUTES:g} to {MOST_MINUTES:g}; correct it"
            )
        for option, value in (("--dilate", self.dilate), ("--shrink", self.shrink)):
            if value is not None and not 1.0 <= value <= MOST_SCALE:
                raise InputError(
                    f"{option}: found {value:g}, expected 1 to {MOST_SCALE:g}; correct it, or leave it out"
                )

    def left_s(self, started_s: float) -> float:
        """Return the seconds that are left of the minutes that began at a time of `time.time`."""
        return self.minutes * 60.0 - (time.time() - started_s)

    @property
    def hosts(self) -> str:
        """Number of hosts and of ranks on each, `8x1`."""
        return f"{self.cluster.nodes}x{self.cluster.ranks_per_node}"

    @property
    def emulation(self) -> Emulation:
        """Return the hosts, with links that nothing limits yet."""
        return parse_emulation(f"{self.hosts}@100gbit")


@dataclass(frozen=True, kw_only=True)
class Asked(Target, ABC):
    """A kind of rehearsal of a target; sent to ranks."""

    COLUMNS: ClassVar[tuple[str, ...]]
    """Further columns of the table."""
    LEFT: ClassVar[tuple[str, ...]]
    """Columns that are aligned to the left."""
    UNDER: ClassVar[str] = ""
    """Words of the title about what executes the plan."""

    @abstractmethod
    def summarize(self, measured: Sequence[Measured]) -> Comparison:
        """Compare from what each rank saw, in order of rank."""

    @abstractmethod
    def notes(self, steps_us: Mapping[str, float], figures: Figures, bounds: Bounds) -> list[str]:
        """Return notes about the rehearsal itself; `steps_us`: by variant."""


@dataclass(frozen=True, kw_only=True)
class AskedPlan(Asked):
    """A rehearsal of a plan with buckets, DDP and strategies."""

    COLUMNS = ("hidden", "buckets")
    LEFT = ("",)
    strategies: tuple[str, ...] = STRATEGIES
    accuracy: Accuracy = "exact"
    allow: tuple[str, ...] = ()
    compress: str | None = None
    only_default: bool = False
    """Whether the plan is compared with DDP's default alone, until their ratio is known well enough: neither DDP's
    hooks nor its best bucket size are measured."""
    global_batch: int | None = None
    """Samples of a step over all ranks, of which the plan has shares by speed; others have equal ones. None: each rank
    has as many as the profile's."""

    @property
    def equal_batch(self) -> float:
        """Return the size of an equal share of the batch over that of the profile."""
        measured = self.profile.world.batch_per_rank
        return self.global_batch / self.cluster.ranks / measured if self.global_batch and measured else 1.0

    @property
    def slowest(self) -> Profile:
        """Return the profile of the slowest rank with an equal share."""
        return on_slowest(self.profile, self.cluster, self.equal_batch)

    @property
    def links(self) -> Cluster:
        """Return the cluster without speeds: they are in `slowest`."""
        return replace(self.cluster, speed=None)

    def summarize(self, measured: Sequence[Measured]) -> Comparison:
        """Compare buckets from what each rank saw, in order of rank."""
        return summarize(measured)

    def notes(self, steps_us: Mapping[str, float], figures: Figures, bounds: Bounds) -> list[str]:
        """Return notes about the rehearsal itself."""
        lines = ["rehearsed on this machine: neither contention on the accelerator nor NCCL's own behaviour is in it"]
        return lines + late_note("hooks and updates", figures["late_us"], steps_us)


@dataclass(frozen=True, kw_only=True)
class AskedWrappings(Asked):
    """A rehearsal of a plan for FSDP2 and the usual wrappings.

    Units are timed waits; parameters, messages, hooks and memory are FSDP2's own. Meshes have one dimension: on hosts
    the all-reduces of HSDP block.
    """

    COLUMNS = ("groups", "peak predicted", "peak counted", "weights")
    LEFT = ("", "weights")
    UNDER = " under FSDP2"
    units: Units
    max_memory_mib: float | None = None

    def setting(self, cluster: Cluster) -> Setting:
        """Return the model on hosts, with the costs of a cluster's messages."""
        problem = make_problem(self.profile, cluster, where=self.name)
        return Setting(problem=problem, units=self.units, executor="hosts")

    def flat(self, **measured: Any) -> Cluster:
        """Return the cluster as one communicator sees it, with measurements of its messages."""
        beta = 8e6 / links_of(self.cluster).inter_bits_per_s
        return replace(
            self.cluster, nodes=self.cluster.ranks, ranks_per_node=1, nics_per_node=1, intra=None,
            inter=Link(alpha_us=0.0, beta_us_per_byte=beta), back_to_back=None, collectives=None, contention=None,
            library=None, nccl=None, measured_for=None, emulated="namespaces", **measured,
        )  # fmt: skip

    def summarize(self, measured: Sequence[Measured]) -> Comparison:
        """Compare wrappings from what each rank saw, in order of rank."""
        return summarize_wrappings(measured)

    def notes(self, steps_us: Mapping[str, float], figures: Figures, bounds: Bounds) -> list[str]:
        """Return notes about the rehearsal itself."""
        lines = [
            "rehearsed on this machine, where hosts wait for messages themselves: neither streams and contention of an "
            "accelerator nor NCCL's own behaviour are in it",
            "HSDP is not rehearsed: on hosts its all-reduces block",
            "peaks are counted in one step of the shrunk model, and the optimizer's state is added by the profile",
        ]
        if (limit := bounds["limit_bytes"]) is not None:
            over = [name for name, size_bytes in figures["counted_bytes"].items() if size_bytes > limit]
            lines.append(f"limit {mebibytes(int(limit))}" + (f"; above it: {', '.join(over)}" if over else ""))
        return lines + late_note("hooks", figures["late_us"], steps_us)


def late_note(what: str, late_us: Mapping[str, float], steps_us: Mapping[str, float]) -> list[str]:
    """Return a line if the work of hosts did not fit under its waits in a step; times by variant, in microseconds."""
    late = [
        f"{name} {late_us[name] / 1e3:.2g} ms"
        for name, step_us in steps_us.items()
        if late_us.get(name, 0.0) > LATE_SHARE * step_us
    ]
    if not late:
        return []
    return [
        f"{what} took longer than the waits that they go on under, of a step: {', '.join(late)}; --dilate or --shrink "
        f"more, or fewer hosts"
    ]


def find_target(
    name: str,
    cluster: str | None,
    hosts: str | None,
    minutes: float = DEFAULT_MINUTES,
    dilate: float | None = None,
    shrink: float | None = None,
) -> Target:
    """Return the model and the hosts that options name.

    Args:
        name: a model of the catalogue, also `MODEL@CLUSTER`, or the path of a profile.
        cluster: likewise; default: the profile's own.
        hosts: HOSTSxRANKS; default: the cluster's.
        minutes: time of the whole rehearsal.
        dilate: factor of times.
        shrink: divisor of bytes.

    Raises:
        InputError: an option is wrong; nothing is known of the links; more ranks than this machine can hold.
    """
    profile = find_profile(name)
    check_profile(profile, name)
    machines = profile.cluster if cluster is None else find_cluster(cluster)
    if machines is None:
        raise InputError(f"{name}: found no cluster, expected MODEL@CLUSTER or --cluster; `planner catalog` lists them")
    match = _HOSTS.fullmatch(hosts) if hosts is not None else None
    if hosts is not None and match is None:
        raise InputError(f"--hosts: found {hosts!r}, expected HOSTSxRANKS, for example 8x1; correct it")
    count, each = (int(match[1]), int(match[2])) if match else (machines.nodes, machines.ranks_per_node)
    if not 2 <= count * each <= MAX_RANKS:
        raise InputError(
            f"--hosts {count}x{each}: found {count * each} ranks, expected 2 to {MAX_RANKS} on one machine; name fewer "
            f"hosts, for example --hosts 8x1"
        )
    chosen = on_hosts(machines, count, each)
    links_of(chosen)  # refuses what is missing before anything is started
    return Target(name=name, profile=profile, cluster=chosen, minutes=minutes, dilate=dilate, shrink=shrink)


def ask_plan(
    target: Target, *, strategies: Sequence[str] = STRATEGIES, accuracy: str = "exact", allow: Sequence[str] = (),
    compress: str | None = None, global_batch: int | None = None,
) -> AskedPlan:  # fmt: skip
    """Return a rehearsal of a plan with buckets. Raises InputError if an option is wrong."""
    checked = check_accuracy(accuracy)
    # Refuses what does not go with that accuracy.
    Request(profile=target.profile, accuracy=checked, compress=compress, global_batch=global_batch)
    profile = replace(on_accelerator(_as_rehearsed(target.profile), target.cluster), cluster=None)
    if global_batch is not None:
        choose_shares(profile, target.cluster, global_batch)  # refuses what ranks cannot share
    return AskedPlan(
        **{**vars(target), "profile": profile}, strategies=tuple(strategies), accuracy=checked, allow=tuple(allow),
        compress=compress, global_batch=global_batch,
    )  # fmt: skip


def ask_wrappings(target: Target, max_memory_mib: float | None = None) -> AskedWrappings:
    """Return a rehearsal of a plan for FSDP2; units are the profile's, or blocks by its gradients' names."""
    problem = make_problem(target.profile, target.cluster, where=target.name)
    resolved = problem.profile
    units = resolved.units or units_of_gradients(problem)
    # What units free before gradients are there is not emulated, nor what is carried from one to the next.
    acted = tuple(
        replace(unit, backward_working_bytes=max(0, unit.backward_working_bytes), carried_bytes=0)
        for unit in units.units
    )
    units = replace(units, units=acted, update_us=units.update_us or problem.update_us, passes_through=("",))
    profile = replace(
        resolved, cluster=None, units=units, world=replace(resolved.world, device="cpu"),
        compute=replace(resolved.compute, estimate=None),
    )  # fmt: skip
    return AskedWrappings(**{**vars(target), "profile": profile}, units=units, max_memory_mib=max_memory_mib)


def _as_rehearsed(profile: Profile) -> Profile:
    """Return what is rehearsed of a profile.

    Parameters that are shrunk have one dimension, so that nothing has low rank; an optimizer that is not described is
    plain SGD; and the layers of a trace become modules, which wait for their own weights.
    """
    compute = profile.compute
    gradients = tuple(replace(gradient, matrix=None) for gradient in compute.gradients)
    if not any("." in gradient.name for gradient in gradients):
        gradients = tuple(replace(gradient, name=f"{gradient.name}.weight") for gradient in gradients)
        if (operator := compute.operator) is not None:
            shapes = tuple(
                replace(shape, parameters=tuple(f"{name}.weight" for name in shape.parameters))
                for shape in operator.shapes
            )
            compute = replace(compute, operator=replace(operator, shapes=shapes))
    return replace(profile, compute=replace(compute, gradients=gradients, optimizer=compute.optimizer or PLAIN_SGD))
