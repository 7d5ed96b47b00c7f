"""`planner rehearse`: a model on a scaled emulated cluster, predicted and measured. Never imports torch.

One launch of ranks does it all: they measure what the machine does as it is, agree on the scale, hold their links to
the scaled rates, time messages alone, predict, and only then run what is compared.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from planner.comparison.report import Comparison, Row
from planner.decide.bounded import split_passes
from planner.documents.catalog import find_cluster, find_profile
from planner.documents.estimate import on_accelerator
from planner.documents.profile import Cluster, ComputeProfile, OptimizerProfile, Profile
from planner.documents.text import milliseconds
from planner.ir import ACCURACIES
from planner.rehearse.scale import Scale, check_profile, links_of, on_hosts
from planner.testbed.hosts import FASTEST_BITS_PER_S, MAX_RANKS, Emulation
from runtime.errors import InputError
from runtime.plan import Accuracy, Plan
from runtime.plan.names import layer_of

if TYPE_CHECKING:
    from rich.table import Table

    from planner.comparison.measure import Measured

T = TypeVar("T")

STRATEGIES = ("wfbp", "single", "mg_wfbp")
DEFAULT_MINUTES, LEAST_MINUTES, MOST_MINUTES = 10.0, 0.5, 600.0
LATE_SHARE = 0.01
"""Of a step, how much host time may not fit under waits without a word."""
COLUMNS = (
    "", "step (ms)", "95 % interval (ms)", "predicted (ms)", "error", "predicted place", "by constants (ms)", "hidden",
    "buckets",
)  # fmt: skip
PLAIN_SGD = OptimizerProfile(name="SGD", adaptive=False, elementwise=True, holds_all=True)
_HOSTS = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class OnHosts:
    """A model, the hosts that are emulated, and at which scale."""

    name: str
    profile: Profile
    cluster: Cluster
    """Of as many hosts and ranks as are emulated."""
    minutes: float = DEFAULT_MINUTES
    dilate: float | None = None
    shrink: float | None = None

    def left_s(self, started_s: float) -> float:
        """Return what is left of the minutes that began then, by `time.time`."""
        return self.minutes * 60.0 - (time.time() - started_s)

    @property
    def hosts(self) -> str:
        """Hosts and ranks on each, `8x1`."""
        return f"{self.cluster.nodes}x{self.cluster.ranks_per_node}"

    @property
    def emulation(self) -> Emulation:
        """The hosts, with links that nothing holds yet."""
        hosts, ranks = self.cluster.nodes, self.cluster.ranks_per_node
        fastest = FASTEST_BITS_PER_S
        return Emulation(hosts=hosts, ranks_per_host=ranks, bits_per_s=fastest, spec=f"{hosts}x{ranks}@100gbit")


@dataclass(frozen=True, kw_only=True)
class Asked(OnHosts):
    """What is to be rehearsed; on its way to ranks."""

    strategies: tuple[str, ...] = STRATEGIES
    accuracy: Accuracy = "exact"
    allow: tuple[str, ...] = ()
    compress: str | None = None


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """What one rank brings home beside what it measured."""

    scale: Scale
    measured: Measured
    from_constants_us: dict[str, float]
    """By variant, its step as the cluster's constants alone predict it, undilated."""
    bound_us: float | None
    """Of the plan's kind, by what was measured of messages alone, undilated."""
    late_us: dict[str, float]
    """By variant, by how much this rank's hooks and updates took longer, per step, than the waits above them."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Everything undilated and unshrunk."""

    name: str
    hosts: str
    scale: Scale
    comparison: Comparison
    from_constants_us: dict[str, float]
    bound_us: float | None
    """No plan of the asked kind takes less, by what was measured of messages alone."""
    late_us: dict[str, float]
    """By variant, on the rank where it is the most."""

    @property
    def title(self) -> str:
        """What was rehearsed where, and at which scale."""
        return (
            f"{self.name} on {self.hosts} hosts, rehearsed: times were {self.scale.dilate:g} times longer and bytes "
            f"{self.scale.shrink:g} times fewer"
        )

    @property
    def notes(self) -> list[str]:
        """What a reader has to know of the rehearsal itself."""
        lines = ["rehearsed on this machine: neither contention on the accelerator nor NCCL's own behaviour is in it"]
        steps_us = {row.name: row.median_us for row in self.comparison.rows if row.median_us is not None}
        return lines + late_note("hooks and updates", self.late_us, steps_us)

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON types: rows as `planner compare --json` has them."""
        rows = [
            asdict(row)
            | {"from_constants_us": self.from_constants_us.get(row.name), "late_us": self.late_us.get(row.name)}
            for row in self.comparison.rows
        ]
        return {
            "name": self.name, "dilate": self.scale.dilate, "shrink": self.scale.shrink, "hosts": self.hosts,
            "bound_us": self.bound_us, "rows": rows,
        }  # fmt: skip


def rehearse(asked: Asked, *, started_s: float | None = None, show_progress: bool = False) -> Rehearsal:
    """Rehearse on emulated hosts of this machine, and return what was measured.

    Args:
        asked: see `make_asked`.
        started_s: by `time.time`, when the minutes began; default: now.
        show_progress: whether standard error has lines on the way.

    Raises:
        EnvironmentFailure: hosts cannot be emulated here; says what cures it.
        InputError: the minutes are too few, or the model does not fit at the scale asked for.
    """
    from planner.rehearse.ranks import rehearse_rank

    return summarize_rehearsal(asked, on_emulated_hosts(rehearse_rank, asked, started_s, show_progress))


def late_note(what: str, late_us: Mapping[str, float], steps_us: Mapping[str, float]) -> list[str]:
    """Return a line where what the host does did not fit under its waits in some variant's step; by variant, in µs."""
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


AnyAsked = TypeVar("AnyAsked", bound=OnHosts)


def on_emulated_hosts(
    run: Callable[[AnyAsked, float, bool], T], asked: AnyAsked, started_s: float | None, show_progress: bool
) -> list[T]:
    """Run a function on every rank of the hosts; return what each found. Raises EnvironmentFailure."""
    from planner.jobs.launch import LocalWorld, run_ranks
    from planner.testbed.hosts import check_namespaces

    check_namespaces()
    world = LocalWorld(ranks=asked.cluster.ranks, emulation=asked.emulation)
    return run_ranks(world, run, asked, time.time() if started_s is None else started_s, show_progress)


def make_asked(
    name: str, cluster: str | None, hosts: str | None, *, strategies: Sequence[str], accuracy: str,
    allow: Sequence[str], minutes: float, dilate: float | None, shrink: float | None, compress: str | None = None,
) -> Asked:  # fmt: skip
    """Return what the options ask for.

    Raises:
        InputError: an option is wrong; nothing is known of the links; more ranks than this machine can hold.
    """
    profile = _as_rehearsed(find_profile(name))
    if accuracy not in ACCURACIES:
        raise InputError(f"--accuracy: found {accuracy!r}, expected one of: {', '.join(ACCURACIES)}")
    split_passes((), accuracy, compress=compress)  # refuses what does not go with that accuracy
    chosen = hosts_of(name, profile, cluster, hosts, minutes)
    return Asked(
        name=name, profile=replace(on_accelerator(profile, chosen), cluster=None), cluster=chosen,
        strategies=tuple(strategies), accuracy=accuracy, allow=tuple(allow), compress=compress, minutes=minutes,
        dilate=dilate, shrink=shrink,
    )  # fmt: skip


def hosts_of(name: str, profile: Profile, cluster: str | None, hosts: str | None, minutes: float) -> Cluster:
    """Return the cluster of as many hosts as are asked for. Raises InputError as `make_asked`."""
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
    if not LEAST_MINUTES <= minutes <= MOST_MINUTES:
        raise InputError(f"--minutes: found {minutes:g}, expected {LEAST_MINUTES:g} to {MOST_MINUTES:g}; correct it")
    chosen = on_hosts(machines, count, each)
    links_of(chosen)  # says what is missing before anything is started
    return chosen


def _as_rehearsed(profile: Profile) -> Profile:
    """The profile with what is rehearsed of it: parameters that are shrunk have one dimension, so that nothing has low
    rank; where nothing is said of the optimizer it is the one that updates them; and the layers of a trace become
    modules, which wait for their own weights.
    """
    compute = profile.compute
    gradients = tuple(replace(gradient, matrix=None) for gradient in compute.gradients)
    if not any("." in gradient.name for gradient in gradients):
        gradients = tuple(replace(gradient, name=f"{gradient.name}.weight") for gradient in gradients)
    return replace(profile, compute=replace(compute, gradients=gradients, optimizer=compute.optimizer or PLAIN_SGD))


def summarize_rehearsal(asked: Asked, ranks: Sequence[Rehearsed]) -> Rehearsal:
    """Return all ranks' measurements, undilated."""
    from planner.comparison.report import summarize

    scale = ranks[0].scale
    comparison = summarize([rank.measured for rank in ranks])
    return Rehearsal(
        name=asked.name,
        hosts=asked.hosts,
        scale=scale,
        comparison=replace(comparison, rows=tuple(_undilated(row, scale.dilate) for row in comparison.rows)),
        from_constants_us=ranks[0].from_constants_us,
        bound_us=ranks[0].bound_us,
        late_us={name: max(rank.late_us.get(name, 0.0) for rank in ranks) / scale.dilate for name in ranks[0].late_us},
    )


def rehearsal_table(found: Rehearsal) -> Table:
    """For the terminal, fastest first."""
    from planner.report.tables import make_table

    title = f"{found.title}; {found.comparison.steps} steps each in {found.comparison.rounds} interleaved rounds"
    table = make_table(title, COLUMNS, left=("",))
    rows = [row for row in found.comparison.rows if row.median_us is not None and row.equal_to is None]
    by_prediction = sorted((row.predicted_us, row.name) for row in rows if row.predicted_us is not None)
    places = {name: place for place, (_, name) in enumerate(by_prediction, start=1)}
    for row in sorted(rows, key=lambda row: row.median_us or 0.0):
        name, step, interval, _, hidden, predicted, error, buckets = row.cells()
        constants = milliseconds(found.from_constants_us.get(row.name))
        table.add_row(name, step, interval, predicted, error, str(places.get(name, "")), constants, hidden, buckets)
    return table


def _undilated(row: Row, dilate: float) -> Row:
    def shorter(time_us: float | None) -> float | None:
        return None if time_us is None else time_us / dilate

    return replace(
        row,
        median_us=shorter(row.median_us),
        ci95_us=None if row.ci95_us is None else (row.ci95_us[0] / dilate, row.ci95_us[1] / dilate),
        exposed_us=shorter(row.exposed_us),
        predicted_us=shorter(row.predicted_us),
        alone_us=shorter(row.alone_us),
    )


def scaled_plan(plan: Plan, scale: Scale, compute: ComputeProfile, fingerprint: str) -> Plan:
    """Return the plan as the scaled model can carry it out: the same buckets, of fewer bytes.

    Args:
        plan: of the model as it is.
        scale: what to scale by.
        compute: the model as it is.
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
            # Of the scaled layer as large a share: small gradients are rounded, and keep an element at least.
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
